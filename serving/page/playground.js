// The page as a whole: models, tabs, theme, links, keys.

const models = new Map(); // id -> facts
const KEPT = "thinker-playground"; // in the storage of the tab
const CHATS = ["chat", "chat2"]; // the conversations in a link
let tab = "write";

// ---- models and tabs -----------------------------------------------------------------------------------------------

async function loadModels() {
  const response = await request("/v1/models"), { data } = await fromNetwork(response.json());
  for (const model of data) models.set(model.id, model);
  const options = () => data.map(({ id }) => make("option", { textContent: id }));
  for (const name of ["model", "other"]) $(name).replaceChildren(...options());
  $("other").selectedIndex = Math.min(1, data.length - 1);
  $("compare-choice").hidden = data.length < 2;
}

function refresh() {
  const chosen = write.active.map(({ model }) => model);
  const noChat = chosen.filter((model) => !model.chat).map(({ id }) => id);
  const count = (number) => number.toLocaleString("en", { notation: "compact", maximumFractionDigits: 1 });
  const [{ parameters, precision, vocab_size, context_length }] = chosen;
  const sizes = `vocabulary of ${count(vocab_size)} · context of ${count(context_length)} tokens`;
  $("facts").textContent = `${count(parameters)} parameters · ${precision} · ${sizes}`;
  $("facts").hidden = chosen.length > 1;
  $("other-choice").hidden = chosen.length < 2;
  $("no-chat").hidden = !noChat.length;
  const lack = `${noChat.join(" and ")} ${noChat.length > 1 ? "lack" : "lacks"}`;
  $("no-chat").textContent = `Chat needs a chat template, which ${lack}. Fine-tune on conversations.`;
  $("tab-chat").ariaDisabled = String(noChat.length > 0);
  const limits = chosen.map(({ max_tokens }) => max_tokens).filter((most) => most !== null);
  settings.limitTokens(limits.length ? Math.min(...limits) : null);
  if (noChat.length) showTab("write");
  write.refresh();
  chat.refresh();
}

function showTab(name) {
  if (name === "chat" && $("tab-chat").ariaDisabled === "true") return;
  tab = name;
  for (const other of ["write", "chat"]) {
    $(other).hidden = other !== name;
    $(`tab-${other}`).ariaSelected = String(other === name);
    $(`tab-${other}`).tabIndex = other === name ? 0 : -1;
  }
  if (name === "chat") for (const conversation of chat.conversations) conversation.scrollToEnd();
}

function startTabs() {
  for (const name of ["write", "chat"]) {
    $(`tab-${name}`).addEventListener("click", () => showTab(name));
    $(`tab-${name}`).addEventListener("keydown", (event) => {
      if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
      const next = name === "write" ? "chat" : "write";
      $(`tab-${next}`).focus();
      showTab(next);
    });
  }
  ["model", "other"].forEach((id, at) => $(id).addEventListener("change", async () => {
    await write.changeModel(write.drafts[at]);
    await chat.stop();
    chat.conversations[at].clear();
    forgetErrors();
    refresh();
  }));
  $("compare").addEventListener("change", async () => {
    await write.changeModel(write.drafts[0]);
    await chat.stop();
    if ($("compare").checked && $("other").value === $("model").value) chooseOther();
    forgetErrors();
    refresh();
  });
}

/** Compare with another model than the first. */
function chooseOther() {
  $("other").value = [...models.keys()].find((id) => id !== $("model").value);
  chat.conversations[1].clear();
}

/** Remove errors of requests, whose cause the user may have corrected. */
function forgetRequestErrors() {
  write.forgetErrors();
  chat.forgetErrors();
}

function forgetErrors() {
  showPageError("");
  forgetRequestErrors();
}

// ---- links ---------------------------------------------------------------------------------------------------------

/** The model, the text, the conversations and the settings as the part of a link after #. */
function linkParameters() {
  const parameters = new URLSearchParams({ model: $("model").value });
  if ($("compare").checked) parameters.set("compare", $("other").value);
  if (tab === "chat") parameters.set("tab", tab);
  if (write.text) parameters.set("prompt", write.text);
  if ($("system").value) parameters.set("system", $("system").value);
  chat.active.forEach(({ asPairs }, at) => {
    if (asPairs.length) parameters.set(CHATS[at], JSON.stringify(asPairs));
  });
  if ($("message").value) parameters.set("message", $("message").value);
  settings.save(parameters);
  return parameters;
}

/** The messages of a conversation in a link; null if they are damaged. */
function readPairs(text) {
  const isPair = (pair) => ["user", "assistant"].includes(pair?.[0]) && typeof pair[1] === "string";
  try {
    const pairs = JSON.parse(text ?? "[]");
    return Array.isArray(pairs) && pairs.every(isPair) ? pairs : null;
  } catch (error) {
    if (error instanceof SyntaxError) return null;
    throw error;
  }
}

/** Show what a link holds. tokens: of the messages of each conversation, where they are known. */
function openLink(parameters = new URLSearchParams(location.hash.slice(1)), tokens = []) {
  const asked = ["model", "compare"].map((name) => parameters.get(name));
  const missing = asked.filter((id) => id !== null && !models.has(id));
  const conversations = CHATS.map((name) => readPairs(parameters.get(name)));
  const errors = [];
  if (missing.length) errors.push(`This server does not have the model ${missing.join(" and ")}.`);
  if (conversations.includes(null)) errors.push("The conversation in this link is damaged. Copy the whole link.");
  showPageError(errors.join(" "));
  if (models.has(parameters.get("model"))) $("model").value = parameters.get("model");
  $("compare").checked = models.has(parameters.get("compare"));
  if ($("compare").checked) $("other").value = parameters.get("compare");
  $("system").value = parameters.get("system") ?? "";
  settings.restore(parameters);
  write.past = [];
  write.setText(parameters.get("prompt") ?? "");
  $("message").value = parameters.get("message") ?? "";
  chat.conversations.forEach((conversation, at) => conversation.restore(conversations[at] ?? [], tokens[at]));
  forgetRequestErrors();
  refresh();
  showTab(parameters.get("tab") === "chat" ? "chat" : "write");
}

function startLinks() {
  $("copy-link").addEventListener("click", (event) => {
    history.replaceState(null, "", `#${linkParameters()}`);
    copyText(location.href, event.target);
  });
  window.addEventListener("hashchange", async () => {
    await Promise.all([write.stop(), chat.stop()]);
    if (models.size) openLink(); // otherwise it is read when the models are known
  });
}

// ---- reload ---------------------------------------------------------------------------------------------------------

/** Keep in this tab what is shown: as a link, and the tokens with their probabilities. */
function keep() {
  if (!models.size) return; // nothing was shown
  const kept = { hash: location.hash, link: String(linkParameters()) };
  const conversations = chat.active.map(({ messages }) => messages.map(({ view }) => view && view.tokens));
  const toJson = (key, value) => (value instanceof Uint8Array ? [...value] : value);
  const whole = JSON.stringify({ ...kept, drafts: write.save(), conversations }, toJson);
  const store = (text) => useStorage("sessionStorage", (storage) => storage.setItem(KEPT, text));
  if (store(whole) === null) store(JSON.stringify({ ...kept, drafts: [], conversations: [] })); // too many tokens
}

/** Show again what the tab had before a reload; a link that is opened instead wins. */
async function reopen() {
  const text = useStorage("sessionStorage", (storage) => storage.getItem(KEPT));
  const toBytes = (key, value) => (key === "bytes" && value ? Uint8Array.from(value) : value);
  const kept = text === null ? null : JSON.parse(text, toBytes);
  if (kept?.hash !== location.hash) return openLink();
  openLink(new URLSearchParams(kept.link), kept.conversations);
  try {
    await write.restore(kept.drafts);
  } catch (error) {
    if (!(error instanceof RequestError)) throw error; // without a vocabulary, the text is shown without tokens
  }
}

// ---- keys, colors, start -------------------------------------------------------------------------------------------

function showPageError(message) {
  $("page-error").textContent = message;
  $("page-error").hidden = !message;
}

function startKeys() {
  document.addEventListener("keydown", (event) => {
    const shown = tab === "write" ? write : chat;
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey) && !shown.isBusy) shown.toggle();
    else if (event.key === "Escape" && shown.isBusy) shown.stop();
    else if (event.key === "Escape") popover.hide();
    else return;
    event.preventDefault();
  });
}

function startColors() {
  FLOORS.forEach((floor, at) => {
    const text = floor ? `${at ? "" : "≥ "}${Math.round(100 * floor)}%` : `< ${100 * FLOORS[at - 1]}%`;
    $("scale").append(make("li", { className: `p${at}`, textContent: text }));
  });
  $("colors").addEventListener("change", (event) => $("work").classList.toggle("plain-tokens", !event.target.checked));
}

async function connect() {
  try {
    await loadModels();
  } catch (error) {
    if (!(error instanceof RequestError)) throw error;
    $("facts").textContent = "";
    // Whoever has not entered a key yet has done nothing wrong: the form says what is needed.
    const isFirst = error.status === 401 && !apiKey;
    if (error.status === 401) $("key").focus();
    return showPageError(isFirst ? "" : error.message);
  }
  await reopen();
  focusText();
}

/** Put the focus where one writes, unless the user has put it elsewhere while the page loaded. */
function focusText() {
  const isFree = [document.body, $("prompt")].includes(document.activeElement);
  if (isFree) (tab === "write" ? write : chat).focusText();
}

startTheme();
settings.start();
write.start();
chat.start();
popover.start();
startTabs();
startLinks();
startKeys();
startColors();
$("settings").addEventListener("input", forgetRequestErrors);
$("system").addEventListener("input", forgetRequestErrors);
window.addEventListener("pagehide", keep);
$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  setApiKey($("key").value);
  $("key-form").hidden = true;
  forgetErrors();
  if (!models.size) connect(); // otherwise the text is kept, and the user tries again
});
write.focusText(); // not by autofocus, which may come after the focus that connect() sets
connect();
