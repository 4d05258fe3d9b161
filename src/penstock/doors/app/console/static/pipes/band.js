// The layers of a model as a band: which machine holds which, and which are loading or missing.

import { layers } from "../format.js";
import { html } from "../vendor/preact-htm.js";
import { machines } from "./machines.js";

const WIDTH = 1000; // in the drawing's own coordinates; it is stretched to the page
const LANE = 30;
const GAP = 4;

/** Put parts into as few lanes as hold them side by side. Those of the route come first, so that they share the top lane. */
export function lanesOf(model) {
  const hops = new Set((model.route?.hops ?? []).map(({ node, layers: [start, end] }) => `${node} ${start}:${end}`));
  const parts = [
    ...(model.missing ?? []).map((range) => ({ kind: "missing", layers: range })),
    ...Object.entries(model.segments ?? {}).map(([key, segment]) => ({ kind: "held", key, first: hops.has(key), ...segment })),
    ...Object.entries(model.loading ?? {}).flatMap(([node, ranges]) => ranges.map((range) => ({ kind: "loading", node, layers: range }))),
  ];
  const rank = ({ kind, first }) => (kind === "missing" || first ? 0 : kind === "held" ? 1 : 2);
  parts.sort((one, other) => rank(one) - rank(other) || one.layers[0] - other.layers[0]);
  const lanes = [];
  for (const part of parts) {
    const lane = lanes.find((taken) => taken.every(({ layers: [start, end] }) => part.layers[1] <= start || part.layers[0] >= end));
    if (lane) lane.push(part);
    else lanes.push([part]);
  }
  return lanes;
}

export function Band({ name, model, onChoose }) {
  const lanes = lanesOf(model);
  const unit = WIDTH / model.num_layers;
  const height = Math.max(1, lanes.length) * (LANE + GAP);
  return html`<figure class="band" aria-label=${`Layers of ${name}`}>
    <div class="band-lanes" style=${{ height: `${height}px` }}>
      <svg viewBox="0 0 ${WIDTH} ${height}" preserveAspectRatio="none" aria-hidden="true">
        ${Array.from({ length: model.num_layers + 1 }, (_, index) => html`<line class="tick" x1=${index * unit} x2=${index * unit} y1="0" y2=${height} />`)}
      </svg>
      ${lanes.map((lane, index) => lane.map((part) => html`<${Part} part=${part} lane=${index} all=${model.num_layers} onChoose=${onChoose} />`))}
    </div>
    <figcaption class="scale muted small number" aria-hidden="true">
      <span>0</span><span>${model.num_layers - 1}</span>
    </figcaption>
  </figure>`;
}

function Part({ part, lane, all, onChoose }) {
  const [start, end] = part.layers;
  const share = (end - start) / all;
  const place = { left: `${(100 * start) / all}%`, width: `${100 * share}%`, top: `${lane * (LANE + GAP)}px`, height: `${LANE}px` };
  const range = layers(part.layers);
  if (part.kind === "missing")
    return html`<div class="part missing" style=${place} role="img" aria-label=${`No machine holds ${range}`}><span>${range} missing</span></div>`;
  const words = `${part.node} ${start}–${end - 1}${part.kind === "loading" ? " is loading" : ""}`;
  return html`<button
    type="button"
    class="part ${part.kind} ${machines.colour(part.node)} ${part.draining ? "draining" : ""}"
    style=${place}
    title=${words}
    aria-label=${words}
    onClick=${() => onChoose(part.node)}
  >
    <span>${part.node}${share > 0.18 ? html`<span class="range"> ${start}–${end - 1}</span>` : ""}</span>
  </button>`;
}
