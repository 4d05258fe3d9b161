// The metrics page: plots of the last hour, as far as this page was open.

import { count, percent, rate, seconds } from "../format.js";
import { live } from "../live.js";
import { useStore } from "../store.js";
import { Empty, Page } from "../ui.js";
import { html, useState } from "../vendor/preact-htm.js";
import { histories } from "./history.js";
import { Plot } from "./plot.js";

const PLOTS = [
  { title: "Throughput", lines: [["generated", "tokens/s"], ["prompt", "prompt tokens/s"]], format: rate, minimum: 10 },
  { title: "Time to first token", lines: [["first_p50", "median"], ["first_p95", "95 %"]], format: seconds, minimum: 0.1 },
  { title: "Time between tokens", lines: [["between_p50", "median"], ["between_p95", "95 %"]], format: seconds, minimum: 0.05 },
  { title: "Queue", lines: [["running", "running"], ["queued", "waiting"]], format: count, minimum: 4 },
  { title: "KV memory", lines: [["kv", "used"]], format: percent, minimum: 1 },
  { title: "Prefix cache", lines: [["prefix", "prompt tokens found"]], format: percent, minimum: 1 },
  { title: "Preemptions", lines: [["preemptions", "a second"]], format: rate, minimum: 1 },
];

export function MetricsPage() {
  const { state } = useStore(live);
  const names = histories.names;
  const [chosen, setChosen] = useState("");
  const name = names.includes(chosen) ? chosen : names[0];
  if (!name) {
    const why = state === null ? "Waiting for the server" : state.scope === "limited" ? "Not for this key" : "No model answers here";
    return html`<${Page} title="Metrics"><${Empty} title=${why} /><//>`;
  }
  const choice =
    names.length > 1 &&
    html`<select aria-label="Model" value=${name} onChange=${(event) => setChosen(event.target.value)}>
      ${names.map((one) => html`<option value=${one}>${one}</option>`)}
    </select>`;
  const history = histories.of(name);
  return html`<${Page} title="Metrics" about=${`${name}, the last hour, while this page is open`} actions=${choice}>
    <div class="plots">${PLOTS.map((plot) => html`<${Plot} key=${name + plot.title} history=${history} ...${plot} />`)}</div>
  <//>`;
}
