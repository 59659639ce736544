// Requests to the server: errors as sentences, one retry when it is busy, events of a stream, bytes of tokens.

// ---- requests ------------------------------------------------------------------------------------------------------

/** What the user should read: the server's own message, or what happened to the connection. */
class RequestError extends Error {
  constructor(message, { status = 0, retryAfter = 0, isTooLong = false } = {}) {
    super(message);
    Object.assign(this, { status, retryAfter, isTooLong });
  }
}

const LOST = "The connection to the server was lost. Check that the server still runs, then try again.";
let apiKey = useStorage("sessionStorage", (storage) => storage.getItem("thinker-api-key"));

function setApiKey(key) {
  apiKey = key;
  useStorage("sessionStorage", (storage) => storage.setItem("thinker-api-key", key));
}

/** Await a promise of the network. Failures become RequestErrors, except that of a request that the user stopped. */
async function fromNetwork(promise) {
  try {
    return await promise;
  } catch (error) {
    throw error.name === "AbortError" ? error : new RequestError(LOST);
  }
}

/** Send a request, with POST if it has a body. Raises RequestError unless it succeeds. */
async function request(path, { body, signal } = {}) {
  const headers = new Headers();
  if (body) headers.set("Content-Type", "application/json");
  if (apiKey) headers.set("Authorization", `Bearer ${apiKey}`);
  const options = { method: body ? "POST" : "GET", headers, body: body && JSON.stringify(body), signal };
  const response = await fromNetwork(fetch(path, options));
  if (response.ok) return response;
  const { status } = response, text = await fromNetwork(response.text());
  if (status === 401) $("key-form").hidden = false;
  const { message = `The server answered with status ${status}.`, code } = errorOf(text);
  const retryAfter = Number(response.headers.get("Retry-After")) || 1;
  throw new RequestError(message, { status, retryAfter, isTooLong: code === "context_length_exceeded" });
}

/** An error in OpenAI's form; {} for anything else, such as a page of a proxy. */
function errorOf(text) {
  try {
    return JSON.parse(text).error ?? {};
  } catch (error) {
    if (error instanceof SyntaxError) return {};
    throw error;
  }
}

/** Send a request. If the server is busy, call `onWait(seconds)` and try once more after that time. */
async function requestPatiently(path, options, onWait) {
  try {
    return await request(path, options);
  } catch (error) {
    if (error.status !== 429) throw error;
    onWait(error.retryAfter);
    await pause(error.retryAfter, options.signal);
    return request(path, options);
  }
}

function pause(seconds, signal) {
  return new Promise((resolve, reject) => {
    setTimeout(resolve, 1000 * seconds);
    signal.addEventListener("abort", () => reject(signal.reason));
  });
}

/** Yield the JSON of each server-sent event until [DONE]. */
async function* readEvents(response) {
  const reader = response.body.getReader(), decoder = new TextDecoder();
  let buffer = "";
  for (;;) {
    const { done, value } = await fromNetwork(reader.read());
    if (done) throw new RequestError(LOST);
    buffer += decoder.decode(value, { stream: true });
    const events = buffer.split(/\r?\n\r?\n/);
    buffer = events.pop(); // the part of an event that has arrived
    for (const event of events.filter((text) => text.startsWith("data: "))) {
      const data = event.slice("data: ".length);
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new RequestError(chunk.error.message);
      yield chunk;
    }
  }
}

// ---- tokens --------------------------------------------------------------------------------------------------------

const vocabularies = new Map(), encoder = new TextEncoder();
const END = "end of text";

/** Fetch a model's vocabulary once. */
async function fetchVocabulary(model) {
  if (!vocabularies.has(model)) {
    const response = await request(`/vocabulary?model=${encodeURIComponent(model)}`);
    vocabularies.set(model, await fromNetwork(response.json()));
  }
  return vocabularies.get(model);
}

/** The names of the special tokens that end a text of a model. */
async function loadEndNames(model) {
  const { eos_ids, special } = await fetchVocabulary(model);
  return new Set(eos_ids.map((id) => special[id]));
}

/** Returns a function from an id of a model to {id, bytes}, or {id, name} for a special token. */
async function loadVocabulary(model) {
  const { tokens, bytes, eos_ids, special } = await fetchVocabulary(model);
  return (id) => {
    if (tokens[id] !== null) return { id, bytes: encoder.encode(tokens[id]) };
    if (bytes[id]) return { id, bytes: Uint8Array.from(bytes[id]) };
    return { id, name: eos_ids.includes(id) ? END : (special[id] ?? `unused token ${id}`) };
  };
}

/** The new tokens of a choice of /v1/completions, each with its `logprob` and `alternatives`, the likeliest first. */
function tokensOfCompletion({ token_ids, logprobs }, lookUp) {
  const idOf = (key) => Number(key.slice("token_id:".length));
  return (token_ids ?? []).map((id, at) => {
    const top = Object.entries(logprobs?.top_logprobs?.[at] ?? {});
    const alternatives = top.map(([key, logprob]) => ({ ...lookUp(idOf(key)), logprob }));
    return withAlternatives({ ...lookUp(id), logprob: logprobs?.token_logprobs?.[at] ?? null }, alternatives);
  });
}

/** The same for a choice of /v1/chat/completions, whose tokens have no ids. endNames: of tokens that end a text. */
function tokensOfChat({ logprobs }, endNames) {
  const nameOf = (token) => (endNames.has(token) ? END : token);
  const read = ({ token, bytes, logprob }) =>
    bytes?.length ? { bytes: Uint8Array.from(bytes), logprob } : { name: nameOf(token), logprob };
  const content = logprobs?.content ?? [];
  return content.map((entry) => withAlternatives(read(entry), entry.top_logprobs.map(read)));
}

/** Add to a token its alternatives, the likeliest first. The token itself is one of them. */
function withAlternatives(token, alternatives) {
  const others = alternatives.filter((other) => !isSame(other, token));
  return { ...token, alternatives: [token, ...others].sort((a, b) => b.logprob - a.logprob) };
}

/** Whether two tokens are the same: by id where they have one, otherwise by bytes. */
function isSame(a, b) {
  if (a.id !== undefined) return a.id === b.id;
  return a.name === b.name && String(a.bytes) === String(b.bytes);
}
