// The server's API: relative to the page, so that a path prefix works, with the key of this browser tab.

import { Store } from "./store.js";

const KEY = "penstock.key";

export class ApiError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

/** The key lives in sessionStorage alone: it is gone when the tab is closed. `asked`: the server has refused a request without it. */
class Access extends Store {
  asked = false;
  refusal = "";

  get key() {
    return sessionStorage.getItem(KEY) ?? "";
  }

  enter(key) {
    sessionStorage.setItem(KEY, key);
    this.asked = false;
    this.refusal = "";
    this.changed();
  }

  refuse(message) {
    this.refusal = this.key ? message : "";
    this.asked = true;
    this.changed();
  }

  leave() {
    sessionStorage.removeItem(KEY);
    location.reload();
  }
}

export const access = new Access();

export const urlOf = (path) => new URL(path, document.baseURI);

/** Send a request. Raises ApiError with what the server says; a refused key opens the key dialog. */
export async function call(path, { method = "GET", body, signal, accept } = {}) {
  const headers = {};
  if (access.key) headers.authorization = `Bearer ${access.key}`;
  if (accept) headers.accept = accept;
  const isForm = body instanceof FormData;
  if (body !== undefined && !isForm) headers["content-type"] = "application/json";
  const sent = isForm || body === undefined ? body : JSON.stringify(body);
  let answer;
  try {
    answer = await fetch(urlOf(path), { method, headers, body: sent, signal, cache: "no-store", credentials: "omit" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server does not answer.", 0);
  }
  if (answer.ok) return answer;
  const message = await messageOf(answer);
  if (answer.status === 401) access.refuse(message);
  throw new ApiError(message, answer.status);
}

/** The message to show for an error; none if it is about the key, since the key dialog is open then. */
export const problemOf = (error) => (error.status === 401 ? "" : error.message);

/** Run a callback whenever a new key was entered; returns a function that stops it. */
export const onKey = (callback) => access.watch(() => access.asked || callback());

export const getJson = async (path, options) => (await call(path, options)).json();

async function messageOf(answer) {
  try {
    const { error } = await answer.json();
    return typeof error === "string" ? error : error.message;
  } catch {
    return `The server answered with status ${answer.status}.`;
  }
}

/** Yield the data of server-sent events, each parsed, until the stream or [DONE] ends it. */
export async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const parts = (rest + value).split(/\r?\n\r?\n/);
      rest = parts.pop();
      for (const part of parts) {
        const data = part
          .split(/\r?\n/)
          .filter((line) => line.startsWith("data:"))
          .map((line) => line.slice(5).trimStart())
          .join("\n");
        if (data === "[DONE]") return;
        if (data) yield JSON.parse(data);
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
