// History: the last hour of every figure, a point a second, in memory that does not grow.

import { live } from "../live.js";

export const POINTS = 3600;

export const SERIES = {
  generated: (model) => model.rates?.generated_tokens,
  prompt: (model) => model.rates?.prompt_tokens,
  first_p50: (model) => model.latencies?.first_token?.p50,
  first_p95: (model) => model.latencies?.first_token?.p95,
  between_p50: (model) => model.latencies?.between_tokens?.p50,
  between_p95: (model) => model.latencies?.between_tokens?.p95,
  running: (model) => model.running,
  queued: (model) => model.queued,
  kv: (model) => (model.kv_tokens ? model.kv_used / model.kv_tokens : undefined),
  preemptions: (model) => model.rates?.preemptions,
  prefix: (model) => model.rates?.prefix_hits,
};

/** A ring of points of one model; NaN where something is unknown. */
export class History {
  #times = new Float64Array(POINTS);
  #values = Object.fromEntries(Object.keys(SERIES).map((name) => [name, new Float32Array(POINTS).fill(NaN)]));
  #next = 0;
  length = 0;

  push(time, model) {
    const last = (this.#next + POINTS - 1) % POINTS;
    if (this.length && time <= this.#times[last]) return; // the clock was set back, or the same second again
    this.#times[this.#next] = time;
    for (const [name, read] of Object.entries(SERIES)) this.#values[name][this.#next] = read(model) ?? NaN;
    this.#next = (this.#next + 1) % POINTS;
    this.length = Math.min(this.length + 1, POINTS);
  }

  /** Times and values in order, as plots take them. Unknown values are null, which plots leave out. */
  series(names) {
    const start = (this.#next + POINTS - this.length) % POINTS;
    const inOrder = (ring) => Array.from({ length: this.length }, (_, index) => ring[(start + index) % POINTS]);
    return [inOrder(this.#times), ...names.map((name) => inOrder(this.#values[name]).map((value) => (Number.isNaN(value) ? null : value)))];
  }

  latest(name) {
    const value = this.#values[name][(this.#next + POINTS - 1) % POINTS];
    return this.length && !Number.isNaN(value) ? value : null;
  }
}

class Histories {
  #byModel = new Map();

  constructor() {
    live.onState((state, time) => {
      for (const [name, model] of Object.entries(state.models)) if (model.counters) this.of(name).push(time, model);
      for (const name of this.#byModel.keys()) if (!state.models[name]) this.#byModel.delete(name);
    });
  }

  of(name) {
    if (!this.#byModel.has(name)) this.#byModel.set(name, new History());
    return this.#byModel.get(name);
  }

  get names() {
    return [...this.#byModel.keys()];
  }
}

export const histories = new Histories();
