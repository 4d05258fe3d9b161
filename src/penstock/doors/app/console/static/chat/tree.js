// A conversation as data: a tree of messages, and which branch is shown. Functions return a new conversation.

const ROOT = "root";
const TITLE_LENGTH = 48;
const FORMAT = "penstock.conversations";

export const newId = () => crypto.getRandomValues(new Uint32Array(3)).reduce((text, word) => text + word.toString(36), "");

export const newConversation = (settings = {}) => ({ id: newId(), title: "", created: Date.now(), updated: Date.now(), settings, nodes: {}, choice: {} });

export const childrenOf = (conversation, parent) => Object.values(conversation.nodes).filter((node) => node.parent === parent);

/** The messages of the branch that is shown, first to last. */
export function shown(conversation) {
  const path = [];
  for (let parent = null; ; ) {
    const children = childrenOf(conversation, parent);
    if (!children.length) return path;
    const chosen = conversation.choice[parent ?? ROOT];
    const node = children.find((child) => child.id === chosen) ?? children.at(-1);
    path.push(node);
    parent = node.id;
  }
}

/** Add a message below another one, or first where `parent` is null, and show it. */
export function add(conversation, parent, message) {
  const node = { id: newId(), parent, at: Date.now(), ...message };
  const title = conversation.title || (message.role === "user" ? titleOf(message.text) : "");
  const nodes = { ...conversation.nodes, [node.id]: node };
  return [{ ...conversation, title, updated: Date.now(), nodes, choice: { ...conversation.choice, [parent ?? ROOT]: node.id } }, node];
}

export function change(conversation, id, changes) {
  const node = { ...conversation.nodes[id], ...changes };
  return { ...conversation, nodes: { ...conversation.nodes, [id]: node } };
}

/** The number of a message among its siblings, and how many there are. */
export function branch(conversation, node) {
  const siblings = childrenOf(conversation, node.parent);
  return { index: siblings.findIndex((one) => one.id === node.id), count: siblings.length };
}

/** Show the sibling `step` places after a message. */
export function turn(conversation, node, step) {
  const siblings = childrenOf(conversation, node.parent);
  const sibling = siblings[branch(conversation, node).index + step];
  return sibling ? { ...conversation, choice: { ...conversation.choice, [node.parent ?? ROOT]: sibling.id } } : conversation;
}

function titleOf(text) {
  const line = text.trim().replace(/\s+/g, " ");
  return line.length > TITLE_LENGTH ? `${line.slice(0, TITLE_LENGTH).trimEnd()}…` : line;
}

// ---- files ----

export const exported = (conversations) => JSON.stringify({ format: FORMAT, version: 1, conversations }, null, 1);

/** Read conversations of a file. Raises Error with what is wrong. */
export function imported(text) {
  let found;
  try {
    found = JSON.parse(text);
  } catch {
    throw new Error("The file is not JSON.");
  }
  if (found?.format !== FORMAT || found.version !== 1 || !Array.isArray(found.conversations))
    throw new Error("The file has no conversations of this console.");
  return found.conversations.map(checked);
}

function checked(found) {
  const nodes = {};
  for (const node of Object.values(found?.nodes ?? {})) {
    const fits = typeof node.id === "string" && typeof node.text === "string" && ["user", "assistant"].includes(node.role);
    if (!fits || !(node.parent === null || typeof node.parent === "string")) throw new Error("The file has a message that cannot be read.");
    nodes[node.id] = node;
  }
  for (const node of Object.values(nodes)) if (node.parent !== null && !nodes[node.parent]) throw new Error("The file lacks a message.");
  return { ...newConversation(), title: String(found.title ?? ""), settings: found.settings ?? {}, nodes, choice: found.choice ?? {} };
}
