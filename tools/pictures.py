"""Draw the pictures of the documents: python tools/pictures.py writes them to docs/img/. A test fails if they are out of date."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tools.drawing import AMBER, BLUE, GREY, INK, ROSE, SOFT, TEAL, VIOLET, Drawing  # noqa: E402

FOLDER = ROOT / "docs/img"
# The transitions of a visit: the path of each arrow, where its label begins, and the lines of the label.
VISIT: dict[tuple[str, str], tuple[str, float, float, list[str]]] = {
    ("VALIDATING", "EMBED"): ("M345 66 C230 80 150 110 132 176", 96, 62, ["new job, granted Spans,", "or more of the prompt"]),
    ("VALIDATING", "PROCESS_LAYERS"): ("M412 84 L412 276", 296, 222, ["layers are left,", "and they are here"]),
    ("VALIDATING", "HEAD"): ("M515 66 C630 80 715 110 728 176", 524, 110, ["back from the layers,", "a row is wanted"]),
    ("VALIDATING", "DONE"): ("M515 52 C900 40 920 480 518 502", 600, 36, ["unknown, no route, or not for this node"]),
    ("EMBED", "PROCESS_LAYERS"): ("M192 220 L340 286", 176, 284, ["next layer is here"]),
    ("EMBED", "SEND"): ("M130 224 L130 376", 138, 330, ["next layer is elsewhere"]),
    ("EMBED", "DONE"): ("M72 218 C-20 330 20 520 342 506", 44, 290, ["client gone,", "or no route"]),
    ("PROCESS_LAYERS", "PROCESS_LAYERS"): ("M500 276 C560 210 610 300 526 306", 576, 258, ["next layer is here, too"]),
    ("PROCESS_LAYERS", "SEND"): ("M340 318 L194 386", 288, 362, ["next layer, or the", "origin, is elsewhere"]),
    ("PROCESS_LAYERS", "VALIDATING"): ("M450 276 L450 86", 458, 222, ["all layers done", "at the origin"]),
    ("PROCESS_LAYERS", "DONE"): ("M430 324 L430 476", 438, 430, ["no route"]),
    ("HEAD", "EMBED"): ("M662 190 C560 140 300 140 196 188", 560, 156, ["more tokens to generate"]),
    ("HEAD", "DONE"): ("M722 224 C690 360 620 440 516 484", 510, 372, ["complete, client gone,", "or no route"]),
    ("SEND", "DONE"): ("M192 420 L340 484", 266, 442, ["handed over"]),
}


def machine(drawing: Drawing, x: float, y: float, name: str, lines: list[str], color: str, *, w: float = 170) -> None:
    h = 58 + 20 * len(lines)
    drawing.box(x, y, w, h)
    drawing.box(x, y, w, 8, fill=color, stroke=color, radius=4)
    drawing.text(x + w / 2, y + 32, name, bold=True, anchor="middle")
    for i, line in enumerate(lines):
        drawing.text(x + w / 2, y + 56 + 20 * i, line, size=13, color=SOFT, anchor="middle")


def band(drawing: Drawing, x: float, y: float, w: float, parts: list[tuple[int, int, str]], layers: int, h: float = 14) -> None:
    """The layers of a model as a strip, coloured by holder."""
    drawing.box(x, y, w, h, fill="#eef3f6", radius=3)
    for start, end, color in parts:
        drawing.box(x + w * start / layers, y, w * (end - start) / layers, h, fill=color, stroke="#ffffff", radius=3)


def pipe() -> Drawing:
    drawing = Drawing(860, 240, "A request enters at one machine; hidden states pass through the layers of the others and return")
    drawing.box(20, 75, 90, 60, fill="#eef3f6")
    drawing.text(65, 110, "client", anchor="middle", bold=True)
    machine(drawing, 190, 50, "your laptop", ["text ⇄ tokens", "layers 0–9"], BLUE)
    machine(drawing, 430, 50, "the desktop", ["numbers only", "layers 10–19"], TEAL)
    machine(drawing, 670, 50, "the old server", ["numbers only", "layers 20–29"], AMBER)
    drawing.arrow((112, 95), (186, 95))
    drawing.arrow((188, 117), (114, 117))
    drawing.text(149, 86, "text", size=12, color=SOFT, anchor="middle")
    for x in (362, 602):
        drawing.arrow((x, 105), (x + 66, 105), color=VIOLET)
    drawing.text(396, 96, "hidden", size=12, color=VIOLET, anchor="middle")
    drawing.text(396, 122, "states", size=12, color=VIOLET, anchor="middle")
    drawing.arrow((755, 150), (755, 200), (275, 200), (275, 152), color=VIOLET)
    drawing.text(515, 220, "hidden states; text and tokens never leave the laptop", size=12, color=VIOLET, anchor="middle")
    band(drawing, 190, 20, 650, [(0, 10, BLUE), (10, 20, TEAL), (20, 30, AMBER)], 30, 10)
    return drawing


def three_machines() -> Drawing:
    drawing = Drawing(860, 270, "The desktop holds the first layers, the laptop the others, the attic a copy of all")
    machine(drawing, 40, 30, "desk", ["created the network", "takes requests"], BLUE, w=200)
    machine(drawing, 330, 30, "laptop", ["joined by invitation", "takes requests"], TEAL, w=200)
    machine(drawing, 620, 30, "attic", ["only holds layers", "sees no text"], AMBER, w=200)
    drawing.arrow((242, 85), (326, 85), color=VIOLET)
    drawing.arrow((326, 105), (244, 105), color=VIOLET)
    drawing.text(285, 76, "route", size=12, color=VIOLET, anchor="middle")
    drawing.curve("M140 130 C160 180 700 180 718 132", color=GREY, dashed=True)
    drawing.text(430, 160, "if the laptop leaves", size=12, color=SOFT, anchor="middle")
    rows = [("desk", [(0, 13, BLUE)]), ("laptop", [(13, 30, TEAL)]), ("attic", [(0, 13, AMBER), (13, 30, AMBER)])]
    for i, (name, held) in enumerate(rows):
        drawing.text(95, 211 + 20 * i, name, size=13, anchor="end", color=SOFT)
        band(drawing, 110, 200 + 20 * i, 640, held, 30)
    drawing.text(760, 211, "layers", size=13, color=SOFT)
    drawing.text(760, 229, "0–29", size=13, color=SOFT)
    return drawing


def lab() -> Drawing:
    drawing = Drawing(860, 280, "People reach the entrance with keys; each of four cards holds a quarter of the layers")
    for x, name in ((235, "gpu1"), (550, "gpu2")):
        drawing.box(x, 30, 290, 196, fill="#f2f6f8")
        drawing.text(x + 14, 54, name, bold=True)
    drawing.text(80, 30, "HTTPS, a key each", size=12, color=SOFT, anchor="middle")
    for i, (who, what) in enumerate([("ada", "chats"), ("bob", "an agent"), ("nightly", "batches")]):
        drawing.box(20, 42 + 62 * i, 120, 48, fill="#eef3f6")
        drawing.text(80, 62 + 62 * i, who, anchor="middle", bold=True, size=13)
        drawing.text(80, 80 + 62 * i, what, anchor="middle", size=12, color=SOFT)
        drawing.arrow((142, 66 + 62 * i), (247, 110 + 14 * i), color=SOFT)
    machine(drawing, 250, 70, "gpu1-a", ["the entrance", "layers 0–19"], BLUE, w=122)
    machine(drawing, 388, 70, "gpu1-b", ["cuda:1", "layers 20–39"], TEAL, w=122)
    machine(drawing, 565, 70, "gpu2-a", ["cuda:0", "layers 40–59"], AMBER, w=122)
    machine(drawing, 703, 70, "gpu2-b", ["cuda:1", "layers 60–79"], ROSE, w=122)
    for x in (373, 688):
        drawing.arrow((x, 125), (x + 13, 125), color=VIOLET)
    drawing.arrow((512, 125), (561, 125), color=VIOLET)
    drawing.arrow((764, 170), (764, 204), (311, 204), (311, 172), color=VIOLET)
    band(drawing, 235, 248, 605, [(0, 20, BLUE), (20, 40, TEAL), (40, 60, AMBER), (60, 80, ROSE)], 80)
    return drawing


def life() -> Drawing:
    """From a client's request to its tokens, over two nodes."""
    drawing = Drawing(860, 372, "The life of a request: at its origin, through another node, and back")
    drawing.box(20, 20, 600, 332, fill="#f2f6f8")
    drawing.text(36, 44, "origin: text, tokens, decisions", bold=True, size=13, color=SOFT)
    drawing.box(650, 20, 190, 332, fill="#f2f6f8")
    drawing.text(666, 44, "another node", bold=True, size=13, color=SOFT)

    def step(x: float, y: float, name: str, what: str, color: str, w: float = 168) -> None:
        drawing.box(x, y, w, 54)
        drawing.box(x, y, 6, 54, fill=color, stroke=color, radius=3)
        drawing.text(x + 18, y + 23, name, bold=True, size=13)
        drawing.text(x + 18, y + 42, what, size=12, color=SOFT)

    step(36, 62, "door", "HTTP, a job on disk", GREY)
    step(236, 62, "JobFactory", "checks, tokenizes", GREY)
    step(436, 62, "WAITING", "in the queue", BLUE)
    step(436, 152, "Scheduler", "grants Spans", BLUE)
    step(436, 242, "EMBED", "tokens to numbers", TEAL)
    step(666, 152, "JobReceiver", "checks the sender", VIOLET, w=158)
    step(666, 242, "PROCESS_LAYERS", "layers 15–29", AMBER, w=158)
    step(236, 242, "PROCESS_LAYERS", "layers 0–14", AMBER)
    step(36, 242, "HEAD", "norm, logits, sample", TEAL)
    step(36, 152, "JobUpdate", "text so far", GREY)
    drawing.arrow((205, 89), (234, 89))
    drawing.arrow((405, 89), (434, 89))
    drawing.arrow((520, 117), (520, 150))
    drawing.arrow((520, 207), (520, 240))
    drawing.arrow((435, 269), (406, 269))
    drawing.arrow((320, 298), (320, 311), (640, 311), (640, 179), (664, 179), color=VIOLET)
    drawing.arrow((745, 207), (745, 240))
    drawing.arrow((745, 298), (745, 338), (120, 338), (120, 299), color=VIOLET)
    drawing.text(480, 329, "NetworkJob: hidden states, never text or token ids", size=12, color=VIOLET, anchor="middle")
    drawing.arrow((120, 241), (120, 208))
    drawing.arrow((120, 151), (120, 118))
    drawing.curve("M205 255 C235 215 300 200 434 186", color=BLUE, dashed=True)
    drawing.text(214, 203, "next token", size=12, color=BLUE)
    return drawing


def visit() -> Drawing:
    """The state machine. A test compares VISIT with the code."""
    drawing = Drawing(860, 560, "The states of a visit and their transitions")
    places = {
        "VALIDATING": (430, 60),
        "EMBED": (130, 200),
        "HEAD": (730, 200),
        "PROCESS_LAYERS": (430, 300),
        "SEND": (130, 400),
        "DONE": (430, 500),
    }
    for arrow, (path, x, y, words) in VISIT.items():
        color = ROSE if arrow[1] == "DONE" and arrow[0] != "SEND" else SOFT
        drawing.curve(path, color=color, dashed=color == ROSE)
        for i, line in enumerate(words):
            drawing.text(x, y + 15 * i, line, size=12, color=color)
    colors = {"VALIDATING": BLUE, "EMBED": TEAL, "HEAD": TEAL, "PROCESS_LAYERS": AMBER, "SEND": VIOLET, "DONE": GREY}
    for name, (x, y) in places.items():
        w = 170 if name in ("VALIDATING", "PROCESS_LAYERS", "DONE") else 124
        drawing.box(x - w / 2, y - 22, w, 44, fill="#ffffff", stroke=colors[name])
        drawing.text(x, y + 5, name, bold=True, size=13, anchor="middle", mono=True, color=INK)
    drawing.arrow((430, 8), (430, 36))
    return drawing


def places() -> Drawing:
    drawing = Drawing(860, 190, "A job is a folder; where it lies is its state")
    stops = [(20, "input/writing", "being written"), (230, "input/ready", "QUEUED"), (440, "processing", "RUNNING")]
    for x, name, state in stops:
        drawing.box(x, 60, 160, 62)
        drawing.text(x + 80, 86, name, mono=True, size=13, anchor="middle", bold=True)
        drawing.text(x + 80, 107, state, size=12, color=SOFT, anchor="middle")
    for y, name, state, color in ((20, "output", "DONE: result.txt", TEAL), (104, "failed", "FAILED: error.txt", ROSE)):
        drawing.box(680, y, 160, 62, stroke=color)
        drawing.text(760, y + 26, name, mono=True, size=13, anchor="middle", bold=True)
        drawing.text(760, y + 47, state, size=12, color=SOFT, anchor="middle")
    for x, what in ((180, "submit"), (390, "claim")):
        drawing.arrow((x + 2, 91), (x + 47, 91), color=BLUE)
        drawing.text(x + 25, 82, what, size=12, color=BLUE, anchor="middle")
    drawing.arrow((602, 82), (677, 52), color=TEAL)
    drawing.arrow((602, 100), (677, 132), color=ROSE)
    drawing.curve("M520 124 C500 170 330 170 312 126", color=GREY, dashed=True)
    drawing.text(416, 178, "its server stopped or died: back, with all tokens so far", size=12, color=SOFT, anchor="middle")
    drawing.text(20, 34, "Each arrow is one atomic rename, with everything before it synced to the disk.", size=13, color=SOFT)
    return drawing


def threats() -> Drawing:
    """Threat model: attackers in red, with each defence beside its arrow."""
    drawing = Drawing(860, 350, "Five kinds of attackers, where they stand, and what stands between them and your text")
    drawing.box(250, 60, 330, 230, fill="#f2f6f8")
    drawing.text(266, 84, "your machine", bold=True, size=13, color=SOFT)
    drawing.box(270, 100, 130, 52, stroke=BLUE)
    drawing.text(335, 131, "HTTP server", anchor="middle", size=13, bold=True)
    drawing.box(430, 100, 130, 52, stroke=VIOLET)
    drawing.text(495, 131, "network port", anchor="middle", size=13, bold=True)
    drawing.box(270, 180, 290, 40, stroke=TEAL)
    drawing.text(415, 205, "text, tokens, keys in memory", anchor="middle", size=13)
    drawing.box(270, 236, 290, 40, stroke=GREY)
    drawing.text(415, 261, "workspace, keys, certificates on disk", anchor="middle", size=13)
    drawing.box(660, 100, 180, 52, stroke=AMBER)
    drawing.text(750, 122, "another member", anchor="middle", size=13, bold=True)
    drawing.text(750, 141, "holds layers, has the weights", anchor="middle", size=11, color=SOFT)

    def attacker(x: float, y: float, name: str, w: float = 150) -> None:
        drawing.box(x, y, w, 32, fill="#fdf1ee", stroke=ROSE, radius=16)
        drawing.text(x + w / 2, y + 21, name, anchor="middle", size=12, color=ROSE, bold=True)

    attacker(20, 34, "an outsider")
    attacker(20, 130, "a client with a key")
    attacker(20, 226, "another user")
    attacker(345, 308, "a thief of the disk")
    attacker(672, 200, "a member")
    drawing.arrow((172, 52), (268, 110), color=ROSE)
    drawing.text(30, 84, "loopback only, or a key;", size=11, color=SOFT)
    drawing.text(30, 99, "TLS; bounds on size and time", size=11, color=SOFT)
    drawing.curve("M172 42 C360 0 520 20 494 97", color=ROSE)
    drawing.text(520, 52, "certificates, encrypted links", size=11, color=SOFT)
    drawing.arrow((172, 146), (268, 134), color=ROSE)
    drawing.text(180, 172, "limits, own", size=11, color=SOFT)
    drawing.text(180, 187, "files and cache", size=11, color=SOFT)
    drawing.arrow((172, 242), (268, 256), color=ROSE)
    drawing.text(110, 280, "modes 0700 and 0600", size=11, color=SOFT, anchor="middle")
    drawing.arrow((420, 307), (420, 279), color=ROSE)
    drawing.text(505, 322, "keys are hashed; the rest is plain: encrypt the disk", size=11, color=SOFT)
    drawing.arrow((562, 118), (657, 118), color=VIOLET)
    drawing.arrow((657, 136), (564, 136), color=VIOLET)
    drawing.text(610, 110, "hidden states", size=11, color=VIOLET, anchor="middle")
    drawing.arrow((747, 199), (747, 155), color=ROSE)
    drawing.text(747, 252, "sees no text, but can work out", size=11, color=SOFT, anchor="middle")
    drawing.text(747, 267, "most of it: invite with care", size=11, color=SOFT, anchor="middle")
    return drawing


def frame() -> Drawing:
    """The bytes of a message, in their order."""
    drawing = Drawing(860, 130, "A message as bytes")
    parts = [
        ("PNSK", "4", 62, BLUE),
        ("version", "1", 66, BLUE),
        ("kind", "1", 56, BLUE),
        ("header length", "4", 106, TEAL),
        ("tensor length", "4", 106, TEAL),
        ("SHA-256", "32", 104, ROSE),
        ("header: msgpack", "up to 16 MiB", 150, AMBER),
        ("tensor", "… 256 MiB in all", 160, VIOLET),
    ]
    x = 24.0
    for name, size, w, color in parts:
        drawing.box(x, 40, w, 44, radius=4)
        drawing.box(x, 40, w, 6, fill=color, stroke=color, radius=2)
        drawing.text(x + w / 2, 69, name, size=12, anchor="middle", bold=True)
        drawing.text(x + w / 2, 104, size, size=11, anchor="middle", color=SOFT)
        x += w + 1
    drawing.text(24, 26, "bytes, from left to right", size=12, color=SOFT)
    return drawing


def wire() -> Drawing:
    """The messages of one answer, from top to bottom."""
    drawing = Drawing(860, 470, "The messages between an origin and the two other nodes of its route")
    at = {"a": 150, "b": 430, "c": 710}
    for node, role in (("a", "origin: text, tokens"), ("b", "layers 10–19"), ("c", "layers 20–29")):
        drawing.box(at[node] - 85, 16, 170, 44)
        drawing.text(at[node], 35, f"node {node}", bold=True, size=13, anchor="middle")
        drawing.text(at[node], 52, role, size=11, color=SOFT, anchor="middle")
        drawing.line((at[node], 60), (at[node], 455), dashed=True)

    def message(y: float, source: str, target: str, name: str, color: str = SOFT) -> None:
        side = 4 if at[target] > at[source] else -4
        drawing.arrow((at[source] + side, y), (at[target] - side, y), color=color)
        between = {frozenset("ab"): 290, frozenset("bc"): 570, frozenset("ac"): 570}[frozenset((source, target))]
        drawing.box(between - 4.2 * len(name) - 6, y - 20, 8.4 * len(name) + 12, 16, fill="#fbfdfe", stroke="#fbfdfe", radius=2)
        drawing.text(between, y - 7, name, size=12, color=color, anchor="middle")

    for y, source, target, name, color in (
        (92, "a", "b", "OpenRoute", BLUE),
        (116, "a", "c", "OpenRoute", BLUE),
        (140, "b", "a", "RouteOffer", BLUE),
        (164, "c", "a", "RouteOffer", BLUE),
        (206, "a", "b", "NetworkJob: prompt", VIOLET),
        (230, "b", "c", "NetworkJob", VIOLET),
        (254, "b", "a", "StageProgress", TEAL),
        (278, "c", "a", "NetworkJob: last row", VIOLET),
        (320, "a", "b", "NetworkJob: a token", VIOLET),
        (344, "b", "c", "NetworkJob", VIOLET),
        (368, "c", "a", "NetworkJob: its row", VIOLET),
        (402, "a", "b", "Ping; back: Pong, Lease", GREY),
        (438, "a", "c", "CloseRoute", BLUE),
    ):
        message(y, source, target, name, color)
    for y, text in (
        (128, "once"),
        (242, "for each chunk"),
        (344, "for each token,"),
        (359, "many at once"),
        (402, "twice a second"),
    ):
        drawing.text(20, y, text, size=11, color=SOFT)
    return drawing


PICTURES = {
    "pipe.svg": pipe,
    "three_machines.svg": three_machines,
    "lab.svg": lab,
    "life.svg": life,
    "visit.svg": visit,
    "places.svg": places,
    "threats.svg": threats,
    "frame.svg": frame,
    "wire.svg": wire,
}


def main() -> None:
    for name, draw in PICTURES.items():
        (FOLDER / name).write_text(draw().render(), encoding="utf-8")


if __name__ == "__main__":
    main()
