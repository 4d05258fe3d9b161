// The route of this node's answers: machines as boxes, and spans that move along the hops.

import { bytes, layers, percent, seconds } from "../format.js";
import { Drawing } from "../ui.js";
import { html } from "../vendor/preact-htm.js";
import { machines } from "./machines.js";

const BOX = { width: 212, height: 104 };
const GAP = { across: 84, down: 46 };
const TOP = 8;
const RETURN = 46; // pixels below the boxes, or right of them, for the return path
const WORDS = 24; // pixels below stacked boxes, for the label of the return path
const NARROW = matchMedia("(max-width: 760px)");
const MAX_DOTS = 6;
const SHORTEST_S = 1.4; // of a dot's round trip: any faster, and no one could follow it

/** The boxes of a route: this node with the model's ends, then every hop elsewhere. Hops of one machine in a row are one box. */
export function boxesOf(state, model) {
  const boxes = [{ node: state.node, ends: true, parts: [] }];
  for (const hop of model.route?.hops ?? []) {
    if (hop.node !== boxes.at(-1).node) boxes.push({ node: hop.node, ends: false, parts: [] });
    boxes.at(-1).parts.push(model.segments?.[`${hop.node} ${hop.layers[0]}:${hop.layers[1]}`] ?? hop);
  }
  if (boxes.length > 1 && boxes.at(-1).node === state.node) boxes[0].home = boxes.pop().parts;
  return boxes;
}

export function RouteDrawing({ state, model, onChoose }) {
  const boxes = boxesOf(state, model);
  const { place, size, way, link, home } = NARROW.matches ? DOWN : ACROSS;
  const { width, height } = size(boxes.length);
  const flows = (model.route?.in_flight ?? 0) > 0 || (model.rates?.steps ?? 0) > 0;
  const path = way(boxes.length);
  const covers = boxes.map((box, index) => ({
    key: box.node,
    ...place(index),
    ...BOX,
    label: `${box.node}: ${heldBy(box)}. Details`,
    onClick: () => onChoose(box.node),
  }));
  return html`<${Drawing} width=${width} height=${height} label="Route of answers" covers=${covers} class="route ${flows ? "flows" : ""}">
    ${boxes.length > 1 && html`<path class="pipe" d=${path} />`}
    ${boxes.length > 1 && flows && html`<${Dots} way=${path} count=${Math.max(1, model.route.in_flight)} duration=${Math.max(SHORTEST_S, model.route.round_trip)} />`}
    ${boxes.slice(1).map((box, index) => html`<g key=${box.node}>${link(place(index), linkOf(state, boxes[index].node, box.node))}</g>`)}
    ${boxes.length > 1 && html`<text class="link" ...${home(width, height)}>${homeWords(model.route)}</text>`}
    ${boxes.map((box, index) => html`<${Box} key=${box.node} box=${box} place=${place(index)} />`)}
  <//>`;
}

/** Boxes side by side; the return path is below them. */
const ACROSS = {
  place: (index) => ({ x: index * (BOX.width + GAP.across) + 1, y: TOP }),
  size: (count) => ({ width: count * BOX.width + (count - 1) * GAP.across + 2, height: TOP + BOX.height + (count > 1 ? RETURN : 0) + 6 }),
  way(count) {
    const middle = TOP + BOX.height / 2;
    const below = TOP + BOX.height + RETURN / 2;
    const end = ACROSS.place(count - 1).x + BOX.width / 2;
    const home = ACROSS.place(0).x + BOX.width / 2;
    return `M${home} ${middle} H${end - 12} Q${end} ${middle} ${end} ${middle + 12} V${below - 12} Q${end} ${below} ${end - 12} ${below} H${home + 12} Q${home} ${below} ${home} ${below - 12} V${middle + 20}`;
  },
  link(from, { round_trip, bytes_per_second }) {
    const x = from.x + BOX.width + GAP.across / 2;
    const y = from.y + BOX.height / 2;
    return html`<path class="arrow" d="M${x + 22} ${y - 5} l7 5 l-7 5" />
      ${round_trip && html`<text class="link" x=${x} y=${y - 12} text-anchor="middle">${seconds(round_trip)}</text>`}
      ${bytes_per_second && html`<text class="link" x=${x} y=${y + 22} text-anchor="middle">${bytes(bytes_per_second)}/s</text>`}`;
  },
  home: (width, height) => ({ x: width / 2, y: height - 12, "text-anchor": "middle" }),
};

/** Stacked boxes, for a phone; the return path is right of them. */
const DOWN = {
  place: (index) => ({ x: 1, y: TOP + index * (BOX.height + GAP.down) }),
  size: (count) => ({ width: BOX.width + 2 * RETURN, height: DOWN.place(count - 1).y + BOX.height + (count > 1 ? WORDS : 0) + 6 }),
  way(count) {
    const middle = BOX.width / 2 + 1;
    const right = BOX.width + RETURN / 2;
    const end = DOWN.place(count - 1).y + BOX.height / 2;
    const home = DOWN.place(0).y + BOX.height / 2;
    return `M${middle} ${home} V${end - 12} Q${middle} ${end} ${middle + 12} ${end} H${right - 12} Q${right} ${end} ${right} ${end - 12} V${home + 12} Q${right} ${home} ${right - 12} ${home} H${middle + 20}`;
  },
  link(from, { round_trip, bytes_per_second }) {
    const x = BOX.width / 2 + 1;
    const y = from.y + BOX.height + GAP.down / 2;
    const words = [round_trip && seconds(round_trip), bytes_per_second && `${bytes(bytes_per_second)}/s`].filter(Boolean);
    return html`<path class="arrow" d="M${x - 5} ${y + 8} l5 7 l5 -7" />
      <text class="link" x=${x + 16} y=${y + 4}>${words.join(" · ")}</text>`;
  },
  home: (_, height) => ({ x: 1, y: height - 8 }),
};

const Dots = ({ way, count, duration }) =>
  Array.from(
    { length: Math.min(count, MAX_DOTS) },
    (_, index, all = Math.min(count, MAX_DOTS)) => html`<circle class="span" r="5">
      <animateMotion dur="${duration}s" begin="${(-duration * index) / all}s" repeatCount="indefinite" path=${way} />
    </circle>`,
  );

/** What either machine has measured of the link between them. */
export function linkOf(state, from, to) {
  return { ...state.nodes?.[from]?.links?.[to], ...state.nodes?.[to]?.links?.[from] };
}

const homeWords = (route) => (route.round_trip ? `${seconds(route.round_trip)} around, ${seconds(route.between_nodes)} of it between machines` : "hidden states come home");

const partsOf = ({ parts, home = [] }) => [...parts, ...home];

const heldBy = (box) =>
  partsOf(box)
    .map((part) => layers(part.layers))
    .join(", ") || "no layers";

function Box({ box, place }) {
  const { node, ends } = box;
  const parts = partsOf(box);
  const time = parts.reduce((sum, part) => sum + (part.seconds ?? 0), 0);
  const kv = parts.find((part) => part.kv_tokens);
  const used = kv ? kv.kv_used / kv.kv_tokens : 0;
  return html`<g class="box ${machines.colour(node)} ${machines.lost.has(node) ? "lost" : ""}" transform="translate(${place.x} ${place.y})">
    <rect class="body" width=${BOX.width} height=${BOX.height} rx="10" />
    <rect class="mark" x="0" y="14" width="4" height=${BOX.height - 28} rx="2" />
    <text class="name" x="18" y="28">${short(node, 20)}</text>
    <text class="fact" x="18" y="50">${short(heldBy(box), 28)}</text>
    <text class="fact" x="18" y="69">${ends ? "text ⇄ tokens" : ""}${ends && time ? " · " : ""}${time ? `${seconds(time)} a pass` : ""}</text>
    <rect class="meter" x="18" y="84" width="110" height="5" rx="2.5" />
    <rect class="meter used" x="18" y="84" width=${110 * used} height="5" rx="2.5" />
    <text class="fact" x=${BOX.width - 14} y="90" text-anchor="end">KV ${percent(used)}</text>
  </g>`;
}

const short = (text, length) => (text.length > length ? `${text.slice(0, length - 1)}…` : text);
