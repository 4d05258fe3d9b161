// Reasoning models write their reasoning between tags at the start of the answer.

const OPEN = "<think>";
const CLOSE = "</think>";

/** Split an answer into reasoning and text. thinking: the reasoning has not ended. */
export function split(text) {
  const start = text.trimStart();
  if (!start.startsWith(OPEN)) return { reasoning: "", answer: OPEN.startsWith(start) ? "" : text, thinking: false };
  const end = start.indexOf(CLOSE);
  if (end < 0) return { reasoning: start.slice(OPEN.length).trim(), answer: "", thinking: true };
  return { reasoning: start.slice(OPEN.length, end).trim(), answer: start.slice(end + CLOSE.length).trimStart(), thinking: false };
}
