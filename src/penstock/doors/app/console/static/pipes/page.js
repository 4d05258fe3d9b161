// The pipes page: a live drawing of the network. Each model has its band of layers and its route.

import { count, layers, percent, plural, rate, seconds } from "../format.js";
import { live } from "../live.js";
import { useStore } from "../store.js";
import { Empty, Icon, Page } from "../ui.js";
import { html, useState } from "../vendor/preact-htm.js";
import { Band } from "./band.js";
import { Command, InviteDialog, MachineDialog } from "./details.js";
import { machines, namesOf, segmentsOf } from "./machines.js";
import { RouteDrawing } from "./route.js";

export function PipesPage() {
  const { state } = useStore(live);
  const [chosen, setChosen] = useState("");
  const [inviting, setInviting] = useState(false);
  if (state === null) return html`<${Page} title="Pipes"><${Empty} title="Waiting for the server" /><//>`;
  if (state.scope === "limited")
    return html`<${Page} title="Pipes"><${Empty} title="Not for this key"><p>A key with limits does not see the network.</p><//><//>`;
  const about = state.network ? `${plural(Object.keys(state.nodes).length, "machine")} in the network ${state.network.name}` : "This machine, without a network";
  const actions = html`<button type="button" class="button" onClick=${() => setInviting(true)}><${Icon} name="plus" />Add a machine</button>`;
  return html`<${Page} title="Pipes" about=${about} actions=${actions}>
    ${Object.entries(state.models).map(([name, model]) => html`<${Pipe} key=${name} name=${name} model=${model} state=${state} onChoose=${setChosen} />`)}
    <${Machines} state=${state} onChoose=${setChosen} />
    ${chosen && html`<${MachineDialog} state=${state} name=${chosen} onClose=${() => setChosen("")} />`}
    ${inviting && html`<${InviteDialog} state=${state} onClose=${() => setInviting(false)} />`}
  <//>`;
}

function Pipe({ name, model, state, onChoose }) {
  const missing = model.missing ?? [];
  return html`<section class="card stack pipe-card" aria-label=${name}>
    <header class="row spread">
      <h2>${name}</h2>
      <${State} model=${model} />
    </header>
    <${Band} name=${name} model=${model} onChoose=${onChoose} />
    ${missing.length > 0 &&
    html`<div class="hole" role="status">
      <p>No machine holds ${missing.map(layers).join(", ")}. On a machine of the network, this adds them:</p>
      <${Command} text=${model.fill ?? "penstock serve"} />
    </div>`}
    ${model.route?.hops.length > 0 && html`<${RouteDrawing} state=${state} model=${model} onChoose=${onChoose} />`}
    ${model.counters && html`<${Figures} model=${model} />`}
  </section>`;
}

function State({ model }) {
  const [kind, words] = !model.complete
    ? ["bad", "layers are missing"]
    : model.route?.state === "opening"
      ? ["warn", "opening a route"]
      : model.route?.state === "none"
        ? ["warn", "no route"]
        : ["good", "complete"];
  return html`<span class="pill"><span class="dot ${kind}"></span>${words}</span>`;
}

function Figures({ model }) {
  const { route, rates } = model;
  const figures = [
    ["Tokens/s", rate(rates?.generated_tokens ?? 0)],
    ["Tokens a step", rates?.batch === undefined ? "–" : rates.batch.toFixed(1)],
    ["Running", count(model.running ?? 0)],
    ["Waiting", count(model.queued ?? 0)],
    ["KV memory", `${percent(model.kv_tokens ? model.kv_used / model.kv_tokens : 0)}`],
    route && ["In flight", `${route.in_flight} of ${route.window}`],
    route?.recoveries > 0 && ["Last pause", seconds(route.last_pause)],
  ].filter(Boolean);
  return html`<dl class="figures">${figures.map(([title, value]) => html`<div key=${title}><dt>${title}</dt><dd>${value}</dd></div>`)}</dl>`;
}

function Machines({ state, onChoose }) {
  const names = [...namesOf(state.nodes), ...machines.lost.keys()];
  if (names.length < 2) return null;
  return html`<section class="stack" aria-label="Machines">
    <h2>Machines</h2>
    <div class="machines">${names.map((name) => html`<${Machine} key=${name} name=${name} node=${state.nodes[name]} parts=${segmentsOf(state, name)} onChoose=${onChoose} />`)}</div>
  </section>`;
}

function Machine({ name, node, parts, onChoose }) {
  const lost = node === undefined;
  const kind = lost ? "bad" : node.state === "ready" ? "good" : "warn";
  const held = parts.map((part) => layers(part.layers)).join(", ") || (lost ? "gone a moment ago" : "no layers");
  return html`<button type="button" class="machine ${machines.colour(name)} ${lost ? "lost" : ""}" onClick=${() => onChoose(name)}>
    <span class="row spread"><strong>${name}</strong><span class="pill"><span class="dot ${kind}"></span>${lost ? "lost" : node.state}</span></span>
    <span class="muted small">${held}</span>
    <span class="muted small">${node?.here ? "this machine" : node?.round_trip !== undefined ? `${seconds(node.round_trip)} away` : ""}</span>
  </button>`;
}
