// Store: a value that components watch. All changes of a frame are drawn once.

import { useEffect, useState } from "./vendor/preact-htm.js";

export class Store {
  #watchers = new Set();
  #frame = 0;

  watch(callback) {
    this.#watchers.add(callback);
    return () => this.#watchers.delete(callback);
  }

  changed() {
    if (this.#frame) return;
    this.#frame = requestAnimationFrame(() => {
      this.#frame = 0;
      for (const callback of [...this.#watchers]) callback();
    });
  }
}

/** Draw the component again whenever the store has changed. */
export function useStore(store) {
  const [, draw] = useState(0);
  useEffect(() => store.watch(() => draw((count) => count + 1)), [store]);
  return store;
}
