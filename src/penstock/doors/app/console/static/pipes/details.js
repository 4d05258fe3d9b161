// What is known about one machine, and how to add another.

import { bytes, count, layers, percent, seconds } from "../format.js";
import { CopyButton, Dialog } from "../ui.js";
import { html } from "../vendor/preact-htm.js";
import { machines, segmentsOf } from "./machines.js";

export function MachineDialog({ state, name, onClose }) {
  const node = state.nodes?.[name];
  const gone = machines.lost.get(name);
  const parts = node ? segmentsOf(state, name) : (gone?.segments ?? []);
  const links = Object.entries(node?.links ?? {});
  return html`<${Dialog} title=${name} onClose=${onClose} kind="wide">
    <div class="stack">
      <dl class="facts">
        <dt>State</dt>
        <dd>${node ? node.state + (node.here ? ", this machine" : "") : "lost"}</dd>
        ${node && html`<dt>Version</dt><dd>${node.version}</dd>`}
        ${node?.round_trip !== undefined && html`<dt>Round trip</dt><dd>${seconds(node.round_trip)}</dd>`}
        ${node?.sent_bytes !== undefined && html`<dt>Sent to it</dt><dd>${bytes(node.sent_bytes)}</dd>`}
      </dl>
      ${parts.map(
        (part) => html`<section class="card" key=${part.model + part.layers}>
          <h3>${layers(part.layers)} of ${part.model}</h3>
          <dl class="facts">
            <dt>Computes on</dt>
            <dd>${part.device}, ${part.dtype}</dd>
            ${part.seconds !== undefined && html`<dt>A pass</dt><dd>${seconds(part.seconds)}</dd>`}
            ${part.load !== undefined && html`<dt>Busy</dt><dd>${percent(part.load)} of its time</dd>`}
            <dt>KV memory</dt>
            <dd>${count(part.kv_used)} of ${count(part.kv_tokens)} tokens used, ${count(part.kv_leased)} leased</dd>
          </dl>
        </section>`,
      )}
      ${links.length > 0 &&
      html`<table>
        <thead><tr><th>Link to</th><th class="number">Round trip</th><th class="number">Bandwidth</th></tr></thead>
        <tbody>
          ${links.map(
            ([other, link]) => html`<tr key=${other}>
              <td>${other}</td>
              <td class="number">${link.round_trip ? seconds(link.round_trip) : "–"}</td>
              <td class="number">${link.bytes_per_second ? `${bytes(link.bytes_per_second)}/s` : "–"}</td>
            </tr>`,
          )}
        </tbody>
      </table>`}
    </div>
  <//>`;
}

export function InviteDialog({ state, onClose }) {
  const steps = [
    ...(state.network ? [] : [["On this machine, once; then start it again", "penstock network create home"]]),
    ["On the machine where the network was created: prints a token for one machine", "penstock network invite laptop"],
    ["On the new machine", "penstock network join TOKEN"],
    ["There too: finds the layers that are missing, and fetches them", "penstock serve"],
  ];
  return html`<${Dialog} title="Add a machine" onClose=${onClose} kind="wide">
    <ol class="steps">
      ${steps.map(([words, command]) => html`<li key=${command}><p>${words}</p><${Command} text=${command} /></li>`)}
    </ol>
  <//>`;
}

export const Command = ({ text }) => html`<div class="command"><code>${text}</code><${CopyButton} text=${text} label="Copy the command" /></div>`;
