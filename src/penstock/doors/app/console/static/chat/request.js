// The request of an answer: settings as people enter them, as fields of POST /v1/chat/completions.

import { split } from "./reasoning.js";
import { call, events } from "../api.js";

/** Numbers that a person may set. An empty one is left to the server. */
export const NUMBERS = [
  { name: "temperature", title: "Temperature", hint: "0 is always the likeliest word", step: 0.1, min: 0, max: 2 },
  { name: "top_p", title: "Top p", hint: "share of likely words", step: 0.05, min: 0, max: 1 },
  { name: "top_k", title: "Top k", hint: "number of likely words", step: 1, min: 0 },
  { name: "min_p", title: "Min p", hint: "least share of the likeliest", step: 0.01, min: 0, max: 1 },
  { name: "repetition_penalty", title: "Repetition penalty", hint: "above 1 repeats less", step: 0.05, min: 0.05 },
  { name: "seed", title: "Seed", hint: "the same one, the same answer", step: 1 },
  { name: "max_tokens", title: "Longest answer", hint: "in tokens", step: 1, min: 1 },
];

/** What is wrong with settings, by field; empty if nothing is. */
export function mistakes(settings) {
  const found = {};
  for (const { name, min, max, step } of NUMBERS) {
    const text = settings[name];
    if (text === undefined || text === "") continue;
    const value = Number(text);
    if (!Number.isFinite(value) || (step === 1 && !Number.isInteger(value))) found[name] = "Not a number that fits.";
    else if ((min !== undefined && value < min) || (max !== undefined && value > max))
      found[name] = max === undefined ? `At least ${min}.` : `From ${min} to ${max}.`;
  }
  if (settings.schema?.trim()) {
    try {
      const schema = JSON.parse(settings.schema);
      if (schema === null || typeof schema !== "object" || Array.isArray(schema)) found.schema = "A schema is a JSON object.";
    } catch (error) {
      found.schema = `Not JSON: ${error.message}`;
    }
  }
  return found;
}

export function requestOf(model, settings, messages) {
  const turns = messages.map(({ role, text }) => ({ role, content: role === "assistant" ? split(text).answer : text }));
  const system = settings.system?.trim();
  const request = {
    model,
    messages: system ? [{ role: "system", content: system }, ...turns] : turns,
    stream: true,
    stream_options: { include_usage: true, continuous_usage_stats: true },
  };
  for (const { name } of NUMBERS) if (settings[name] !== undefined && settings[name] !== "") request[name] = Number(settings[name]);
  if (settings.schema?.trim())
    request.response_format = { type: "json_schema", json_schema: { name: "answer", schema: JSON.parse(settings.schema) } };
  return request;
}

/** Yield the answer so far: its text and its figures. Ends with the stream. */
export async function* stream(request, signal) {
  const started = performance.now();
  let text = "";
  let first = null;
  let last = null;
  let usage = null;
  let finish = null;
  for await (const chunk of events(await call("v1/chat/completions", { method: "POST", body: request, signal }))) {
    if (chunk.error) throw new Error(chunk.error.message);
    usage = chunk.usage ?? usage;
    const choice = chunk.choices[0];
    if (choice?.delta.content) {
      text += choice.delta.content;
      last = performance.now();
      first ??= last;
    }
    finish = choice?.finish_reason ?? finish;
    const tokens = usage?.completion_tokens ?? 0;
    yield {
      text,
      finish,
      stats: {
        tokens,
        prompt: usage?.prompt_tokens ?? 0,
        cached: usage?.prompt_tokens_details?.cached_tokens ?? 0,
        first: first === null ? null : (first - started) / 1000,
        rate: first !== null && last > first && tokens > 1 ? ((tokens - 1) * 1000) / (last - first) : null,
      },
    };
  }
}
