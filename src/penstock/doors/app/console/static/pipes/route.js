// The way of this node's answers: machines as boxes, and spans that move along the hops.

import { bytes, layers, percent, seconds } from "../format.js";
import { Drawing } from "../ui.js";
import { html } from "../vendor/preact-htm.js";
import { machines } from "./machines.js";

const BOX = { width: 212, height: 104 };
const GAP = 84;
const TOP = 8;
const RETURN = 46; // pixels below the boxes where what comes home travels
const MAX_DOTS = 6;
const SHORTEST_S = 1.4; // of a dot's way around: faster, and nobody could follow it

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
  const width = boxes.length * BOX.width + (boxes.length - 1) * GAP + 2;
  const height = TOP + BOX.height + (boxes.length > 1 ? RETURN : 0) + 6;
  const flows = (model.route?.in_flight ?? 0) > 0 || (model.rates?.steps ?? 0) > 0;
  const way = wayOf(boxes.length);
  const covers = boxes.map((box, index) => ({
    key: box.node,
    x: leftOf(index),
    y: TOP,
    ...BOX,
    label: `${box.node}: ${heldBy(box)}. Details`,
    onClick: () => onChoose(box.node),
  }));
  return html`<${Drawing} width=${width} height=${height} label="Route of answers" covers=${covers} class="route ${flows ? "flows" : ""}">
    ${boxes.length > 1 && html`<path class="pipe" d=${way} />`}
    ${boxes.length > 1 && flows && html`<${Dots} way=${way} count=${Math.max(1, model.route.in_flight)} duration=${Math.max(SHORTEST_S, model.route.round_trip)} />`}
    ${boxes.slice(1).map((box, index) => html`<${Link} key=${box.node} index=${index} link=${linkOf(state, boxes[index].node, box.node)} />`)}
    ${boxes.length > 1 && html`<text class="link" x=${width / 2} y=${height - 12} text-anchor="middle">${homeWords(model.route)}</text>`}
    ${boxes.map((box, index) => html`<${Box} key=${box.node} box=${box} index=${index} />`)}
  <//>`;
}

const leftOf = (index) => index * (BOX.width + GAP) + 1;

/** Out of the first box, through all others, and home below them. */
function wayOf(count) {
  const middle = TOP + BOX.height / 2;
  const below = TOP + BOX.height + RETURN / 2;
  const end = leftOf(count - 1) + BOX.width / 2;
  const home = leftOf(0) + BOX.width / 2;
  return `M${home} ${middle} H${end - 12} Q${end} ${middle} ${end} ${middle + 12} V${below - 12} Q${end} ${below} ${end - 12} ${below} H${home + 12} Q${home} ${below} ${home} ${below - 12} V${middle + 20}`;
}

const Dots = ({ way, count, duration }) =>
  Array.from(
    { length: Math.min(count, MAX_DOTS) },
    (_, index, all = Math.min(count, MAX_DOTS)) => html`<circle class="span" r="5">
      <animateMotion dur="${duration}s" begin="${(-duration * index) / all}s" repeatCount="indefinite" path=${way} />
    </circle>`,
  );

function Link({ index, link }) {
  const x = leftOf(index) + BOX.width + GAP / 2;
  const y = TOP + BOX.height / 2;
  return html`<g>
    <path class="arrow" d="M${x + 22} ${y - 5} l7 5 l-7 5" />
    ${link.round_trip && html`<text class="link" x=${x} y=${y - 12} text-anchor="middle">${seconds(link.round_trip)}</text>`}
    ${link.bytes_per_second && html`<text class="link" x=${x} y=${y + 22} text-anchor="middle">${bytes(link.bytes_per_second)}/s</text>`}
  </g>`;
}

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

function Box({ box, index }) {
  const { node, ends } = box;
  const parts = partsOf(box);
  const time = parts.reduce((sum, part) => sum + (part.seconds ?? 0), 0);
  const kv = parts.find((part) => part.kv_tokens);
  const used = kv ? kv.kv_used / kv.kv_tokens : 0;
  return html`<g class="box ${machines.colour(node)} ${machines.lost.has(node) ? "lost" : ""}" transform="translate(${leftOf(index)} ${TOP})">
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
