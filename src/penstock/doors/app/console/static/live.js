// Live: the newest state of the node and its network, from GET /events.

import { ApiError, access, call, events } from "./api.js";
import { Store } from "./store.js";

const RETRY_MS = [500, 1000, 2000, 4000];

/** Apply a JSON merge patch (RFC 7396). Reuses unchanged parts, so that comparing references shows what changed. */
export function merge(target, patch) {
  if (patch === null || typeof patch !== "object" || Array.isArray(patch)) return patch;
  const merged = target !== null && typeof target === "object" && !Array.isArray(target) ? { ...target } : {};
  for (const [name, value] of Object.entries(patch)) {
    if (value === null) delete merged[name];
    else merged[name] = merge(merged[name], value);
  }
  return merged;
}

/** state: null until the first snapshot. connection: connecting, open or lost. onState: called with each new state. */
export class Live extends Store {
  state = null;
  time = 0;
  connection = "connecting";
  #listeners = new Set();

  onState(listener) {
    this.#listeners.add(listener);
    return () => this.#listeners.delete(listener);
  }

  async run() {
    for (let failures = 0; ; ) {
      if (access.asked) await this.#untilKey();
      try {
        for await (const event of events(await call("events"))) {
          failures = 0;
          this.take(event);
        }
      } catch (error) {
        if (!(error instanceof ApiError) && !(error instanceof TypeError)) throw error;
      }
      this.connection = "lost";
      this.changed();
      await new Promise((wake) => setTimeout(wake, RETRY_MS[Math.min(failures++, RETRY_MS.length - 1)]));
    }
  }

  take(event) {
    this.connection = "open";
    this.time = event.time;
    this.state = event.type === "snapshot" ? event.state : merge(this.state, event.changes);
    for (const listener of this.#listeners) listener(this.state, event.time);
    this.changed();
  }

  #untilKey() {
    return new Promise((resolve) => {
      const stop = access.watch(() => {
        if (access.asked) return;
        stop();
        resolve();
      });
    });
  }
}

export const live = new Live();
