// Machines: which machine has which colour, and which ones were lost a moment ago.

import { live } from "../live.js";

const COLOURS = 8;
const SHOW_LOST_S = 60;

class Machines {
  #numbers = new Map(); // by name, in the order in which they appeared
  #seen = new Map(); // name -> {node, time} while it is there
  lost = new Map(); // name -> {node, segments, time}: gone a moment ago

  constructor() {
    live.onState((state, time) => this.#take(state, time));
  }

  /** The class that gives a machine's colour. */
  colour(name) {
    if (!this.#numbers.has(name)) this.#numbers.set(name, this.#numbers.size);
    return `colour-${this.#numbers.get(name) % COLOURS}`;
  }

  #take(state, time) {
    const nodes = state.nodes ?? {};
    for (const name of namesOf(nodes)) {
      this.colour(name);
      this.#seen.set(name, { node: nodes[name], segments: segmentsOf(state, name) });
      this.lost.delete(name);
    }
    for (const [name, seen] of this.#seen) {
      if (nodes[name]) continue;
      this.#seen.delete(name);
      if (seen.node.state !== "draining") this.lost.set(name, { ...seen, time });
    }
    for (const [name, { time: since }] of this.lost) if (time - since > SHOW_LOST_S) this.lost.delete(name);
  }
}

/** The names of all machines, this one first. */
export const namesOf = (nodes) =>
  Object.keys(nodes).sort((one, other) => Number(nodes[other].here) - Number(nodes[one].here) || one.localeCompare(other));

/** The parts of all models that a machine holds, each with its model. */
export function segmentsOf(state, name) {
  const found = [];
  for (const [model, { segments }] of Object.entries(state.models))
    for (const segment of Object.values(segments ?? {})) if (segment.node === name) found.push({ model, ...segment });
  return found;
}

export const machines = new Machines();
