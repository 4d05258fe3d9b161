// JobsOnDisk: the jobs of the workspace and the batches, read again whenever the event stream says that they have changed.

import { call, getJson, onKey, problemOf } from "../api.js";
import { live } from "../live.js";
import { Store } from "../store.js";

const LIMIT = 200;
const PAUSE_MS = 1000; // minimum time between two reads
const AGAIN_MS = 10_000; // read again after this long even without a change

class JobsOnDisk extends Store {
  jobs = [];
  batches = [];
  problem = "";
  #watchers = 0;
  #due = false;
  #timer = 0;
  #seen = "";

  constructor() {
    super();
    live.onState((state) => {
      const now = JSON.stringify([state.workspace, Object.keys(state.jobs).length, Object.keys(state.ended).at(-1)]);
      if (now !== this.#seen && this.#watchers) this.refresh();
      this.#seen = now;
    });
  }

  /** Keep reading while a page is shown; returns a function that stops it. */
  keepFresh() {
    this.#watchers += 1;
    this.refresh();
    const timer = setInterval(() => this.refresh(), AGAIN_MS);
    const stop = onKey(() => this.refresh());
    return () => {
      stop();
      this.#watchers -= 1;
      clearInterval(timer);
    };
  }

  refresh() {
    if (this.#timer) {
      this.#due = true;
      return;
    }
    this.#read();
    this.#timer = setTimeout(() => {
      this.#timer = 0;
      if (this.#due) this.refresh();
      this.#due = false;
    }, PAUSE_MS);
  }

  async #read() {
    try {
      [this.jobs, this.batches] = await Promise.all([
        getJson(`jobs?limit=${LIMIT}`).then(({ jobs }) => jobs),
        live.state?.workspace ? getJson("v1/batches?limit=50").then(({ data }) => data) : [],
      ]);
      this.problem = "";
    } catch (error) {
      this.problem = problemOf(error);
    }
    this.changed();
  }

  /** Do something with a job or a batch, and read again. */
  async #change(path, body) {
    try {
      await call(path, { method: "POST", body });
      this.problem = "";
    } catch (error) {
      this.problem = error.message;
      this.changed();
    }
    this.refresh();
  }

  cancel = (id) => this.#change(`jobs/${encodeURIComponent(id)}/cancel`);
  retry = (id) => this.#change(`jobs/${encodeURIComponent(id)}/retry`);
  cancelBatch = (id) => this.#change(`v1/batches/${encodeURIComponent(id)}/cancel`);

  /** Upload a file of requests, and start it. All of its lines go to one endpoint, which the first one names. */
  async submit(file) {
    try {
      const { url } = JSON.parse((await file.text()).split("\n", 1)[0]);
      const form = new FormData();
      form.append("purpose", "batch");
      form.append("file", file);
      const { id } = await (await call("v1/files", { method: "POST", body: form })).json();
      await this.#change("v1/batches", { input_file_id: id, endpoint: url, completion_window: "24h" });
    } catch (error) {
      this.problem = error instanceof SyntaxError ? "The first line of the file is not JSON." : error.message;
      this.changed();
    }
  }
}

export const disk = new JobsOnDisk();
