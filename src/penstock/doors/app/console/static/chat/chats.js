// Chats: the conversations of this browser, and the answers that are being written. It outlives the page that shows it.

import { getJson, problemOf } from "../api.js";
import { Store } from "../store.js";
import { mistakes, requestOf, stream } from "./request.js";
import { add, change, exported, imported, newConversation, shown } from "./tree.js";

const SAVE_EVERY_MS = 2000;
// Servers behind one address, each below its own path, have their own conversations and models.
const PATH = new URL(".", document.baseURI).pathname;
const PREFIX = `penstock.chat ${PATH} `;
const CHOSEN = `penstock.model ${PATH}`;

class Chats extends Store {
  models = [];
  model = localStorage.getItem(CHOSEN) ?? "";
  problem = "";
  current = newConversation();
  #all = new Map(); // by id, without what is only in `current`
  #runs = new Map(); // AbortController by the id of the conversation

  constructor() {
    super();
    for (const name of Object.keys(localStorage).filter((name) => name.startsWith(PREFIX))) {
      try {
        const found = JSON.parse(localStorage.getItem(name));
        this.#all.set(found.id, found);
      } catch {
        localStorage.removeItem(name);
      }
    }
    addEventListener("pagehide", () => this.#runs.forEach((_, id) => this.#save(this.#all.get(id))));
  }

  /** Newest first. */
  get all() {
    return [...this.#all.values()].sort((one, other) => other.updated - one.updated);
  }

  get running() {
    return this.#runs.has(this.current.id);
  }

  isRunning(id) {
    return this.#runs.has(id);
  }

  async loadModels() {
    try {
      const { data } = await getJson("v1/models");
      this.models = data.map((model) => model.id);
      if (!this.models.includes(this.model)) this.model = this.models[0] ?? "";
      this.problem = "";
    } catch (error) {
      this.problem = problemOf(error);
    }
    this.changed();
  }

  choose(model) {
    this.model = model;
    localStorage.setItem(CHOSEN, model);
    this.changed();
  }

  start() {
    this.current = newConversation(this.current.settings);
    this.changed();
  }

  /** Show a conversation. It goes on with the model of its last answer. */
  open(id) {
    this.current = this.#all.get(id) ?? this.current;
    const { model } = shown(this.current).findLast((message) => message.role === "assistant") ?? {};
    if (this.models.includes(model)) this.model = model;
    this.changed();
  }

  remove(id) {
    this.#runs.get(id)?.abort();
    this.#all.delete(id);
    localStorage.removeItem(PREFIX + id);
    if (this.current.id === id) this.start();
    this.changed();
  }

  configure(settings) {
    this.#put({ ...this.current, settings });
  }

  /** Show another branch. */
  show(conversation) {
    this.#put(conversation);
  }

  /** Ask below a message, or at the start. */
  send(text, parent = shown(this.current).at(-1)?.id ?? null) {
    const [asked, question] = add(this.current, parent, { role: "user", text });
    return this.#answer(asked, question.id);
  }

  /** Generate another answer to the same question. */
  regenerate(answer) {
    return this.#answer(this.current, answer.parent);
  }

  stop() {
    this.#runs.get(this.current.id)?.abort();
  }

  export(id) {
    return exported(id ? [this.#all.get(id)] : this.all);
  }

  import(text) {
    const found = imported(text);
    for (const conversation of found) {
      this.#all.set(conversation.id, conversation);
      this.#save(conversation);
    }
    if (found.length) this.open(found[0].id);
    return found.length;
  }

  async #answer(conversation, question) {
    if (this.isRunning(conversation.id)) return; // two clicks before the first one is drawn
    const wrong = Object.values(mistakes(conversation.settings))[0];
    const [waiting, { id }] = add(conversation, question, { role: "assistant", text: "", model: this.model, stats: null });
    this.#put(waiting);
    if (wrong) return this.#update(waiting.id, id, { error: `Settings: ${wrong}` }, true);
    const run = new AbortController();
    this.#runs.set(waiting.id, run);
    let saved = Date.now();
    const messages = shown(waiting).slice(0, -1).filter((message) => !message.error || message.text);
    try {
      for await (const part of stream(requestOf(this.model, waiting.settings, messages), run.signal)) {
        const due = Date.now() - saved > SAVE_EVERY_MS;
        if (due) saved = Date.now();
        this.#update(waiting.id, id, part, due);
      }
    } catch (error) {
      this.#update(waiting.id, id, run.signal.aborted ? { finish: "stopped" } : { error: error.message });
    }
    this.#runs.delete(waiting.id);
    this.#update(waiting.id, id, {}, true);
  }

  #update(conversation, message, changes, save = false) {
    const found = this.#all.get(conversation);
    if (found) this.#put(change(found, message, changes), save);
  }

  #put(conversation, save = true) {
    if (Object.keys(conversation.nodes).length) {
      this.#all.set(conversation.id, conversation);
      if (save) this.#save(conversation);
    }
    if (this.current.id === conversation.id) this.current = conversation;
    this.changed();
  }

  #save(conversation) {
    if (!conversation) return;
    try {
      localStorage.setItem(PREFIX + conversation.id, JSON.stringify(conversation));
    } catch {
      this.problem = "This browser has no room for more conversations. Export some, and delete them.";
    }
  }
}

export const chats = new Chats();
