// A pane shows what one model writes: it runs one request at a time, and shows its progress, speed and errors.

const announce = (text) => ($("status").textContent = text);

/** Copy a text; browsers without a clipboard (pages that are neither local nor https) copy from a selection. */
async function copyText(text, button) {
  try {
    await writeToClipboard(text);
  } catch (error) {
    if (!(error instanceof DOMException)) throw error;
    announce("The browser does not allow copying.");
    return;
  }
  announce("Copied.");
  if (button.textContent === "Copied") return; // its label comes back by itself
  const label = button.textContent;
  button.textContent = "Copied";
  setTimeout(() => (button.textContent = label), 1500);
}

/** Browsers without a clipboard (on pages that are neither local nor https) copy a selection. */
async function writeToClipboard(text) {
  if (navigator.clipboard) {
    await navigator.clipboard.writeText(text);
    return;
  }
  const area = make("textarea", { value: text });
  document.body.append(area);
  area.select();
  const isCopied = document.execCommand("copy");
  area.remove();
  if (!isCopied) throw new DOMException("not copied");
}

/** Whether a key is Enter alone, which sends. An input method also uses Enter, to choose a word. */
function isPlainEnter({ key, shiftKey, ctrlKey, metaKey, altKey, isComposing }) {
  return key === "Enter" && !(shiftKey || ctrlKey || metaKey || altKey || isComposing);
}

class Pane {
  /** select: the control that holds the model. changed(): called when a request starts or ends. */
  constructor(box, select, changed) {
    Object.assign(this, { select, changed, controller: null, running: null, stats: "" });
    this.root = $("pane").content.cloneNode(true).firstElementChild;
    this.find = (selector) => this.root.querySelector(selector);
    this.find(".seed").addEventListener("click", () => settings.set("seed", this.seed));
    box.append(this.root);
  }

  get model() {
    return models.get(this.select.value);
  }

  addTool(label, act) {
    const button = make("button", { type: "button", className: "small", textContent: label });
    button.addEventListener("click", () => act(button));
    this.find(".tools").append(button);
    return button;
  }

  /** A button that fills in an example, beside the place of the statistics. */
  addExample(id, act) {
    const button = make("button", { type: "button", className: "small example", id, hidden: true });
    button.addEventListener("click", act);
    this.find(".foot").prepend(button);
  }

  showError(message) {
    this.find(".error").textContent = message;
    this.find(".error").hidden = !message;
  }

  /** Remove the error of the last request, as what it complained about may have changed. */
  forgetError() {
    if (!this.controller) this.showError("");
  }

  showStats(text) {
    this.find(".stats").textContent = text;
  }

  showSeed(seed) {
    this.seed = seed;
    this.find(".seed").hidden = seed === null;
    this.find(".seed").textContent = `Reuse seed ${seed}`;
  }

  /** Stop the request, and wait until its last tokens are shown. */
  async stop() {
    this.controller?.abort();
    await this.running;
  }

  /** Load what reading an answer needs. */
  async prepare() {}

  /** Send a request. A pane may shorten what is too long for the model. */
  send(path, options, onWait) {
    return requestPatiently(path, options, onWait);
  }

  /** What the model does not see, beside the statistics. */
  get note() {
    return "";
  }

  scrollToEnd() {
    const body = this.find(".body");
    body.scrollTop = body.scrollHeight;
  }

  /** Whether a token is shown as a part of the text. */
  shows() {
    return true;
  }

  /** Run a request; its tokens go to `view`. read(choice): the new tokens of a choice. Returns whether it ended. */
  run(path, body, view, read) {
    this.running = this.stream(path, body, view, read);
    return this.running;
  }

  async stream(path, body, view, read) {
    const { signal } = (this.controller = new AbortController());
    const speed = new Speed(this, view), asked = settings.value("logprobs");
    this.showError("");
    this.showStats("Reading the prompt…");
    this.changed();
    this.scrollToEnd(); // where the new text appears
    announce("Writing.");
    try {
      await this.prepare();
      speed.started = performance.now();
      const wait = (seconds) => this.showError(`The server is busy. Trying again in ${seconds} s.`);
      const response = await this.send(path, { body, signal }, wait);
      this.showError("");
      let reason = null;
      for await (const { choices, usage, timings } of readEvents(response)) {
        if (usage) speed.promptTokens = usage.prompt_tokens;
        if (timings) speed.measured = timings.predicted_per_second;
        for (const choice of choices) {
          if (choice.seed !== undefined) this.showSeed(choice.seed);
          const tokens = read(choice);
          for (const token of tokens) if (this.shows(token)) view.push({ ...token, asked });
          speed.add(tokens.length);
          reason = choice.finish_reason ?? reason;
        }
      }
      speed.end(reason === "length" ? "reached max tokens" : "the text ended");
      return true;
    } catch (error) {
      if (error.name !== "AbortError" && !(error instanceof RequestError)) throw error;
      if (error instanceof RequestError) this.showError(error.message);
      const how = speed.count ? "an error ended it" : ""; // the error says what happened
      speed.end(error instanceof RequestError ? how : "stopped");
      return false;
    } finally {
      view.flush();
      this.controller = null;
      this.changed();
    }
  }
}

const BURST = 15; // ms, in which tokens that arrived together are read
const SHORTEST = 1000; // ms: in less, one burst that is read late changes the speed too much

/** Measures a request: time to the first token, tokens per second after it, share of the context. */
class Speed {
  constructor(pane, view) {
    const times = { started: 0, first: 0, from: 0, last: 0 }; // from: the end of the first burst
    Object.assign(this, { pane, view, count: 0, atFirst: 0, promptTokens: null, measured: null, ...times });
  }

  add(count) {
    if (!count) return;
    this.last = performance.now();
    if (!this.count) this.first = this.last;
    this.count += count;
    // Tokens arrive in bursts. Those that come with the first took no time after it.
    if (this.last - this.first < BURST) Object.assign(this, { from: this.last, atFirst: this.count });
    this.pane.showStats(this.text());
  }

  /** As the server measures it; until then, of what follows the first burst; null at first. */
  get perSecond() {
    if (this.measured !== null) return this.measured;
    const time = this.last - this.from;
    return time < SHORTEST ? null : (1000 * (this.count - this.atFirst)) / time;
  }

  text() {
    const parts = [], rate = this.perSecond;
    if (this.count) parts.push(`first after ${(this.first - this.started).toFixed(0)} ms`);
    if (rate !== null) parts.push(`then ${rate.toFixed(rate < 10 ? 1 : 0)} tokens/s`);
    const used = this.promptTokens === null ? this.pane.usedTokens : this.promptTokens + this.count;
    const { context_length } = this.pane.model, slides = used > context_length ? " (sliding)" : "";
    const seen = Math.min(used, context_length).toLocaleString("en");
    if (used) parts.push(`context ${seen} of ${context_length.toLocaleString("en")}${slides}`);
    if (this.pane.note) parts.push(this.pane.note);
    return parts.join(" · ");
  }

  end(how) {
    this.pane.showStats([this.text(), how].filter(Boolean).join(" · "));
    announce([`${this.count} tokens`, how].filter(Boolean).join(", ") + ".");
  }
}
