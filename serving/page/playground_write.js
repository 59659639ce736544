// Write: a text, and what the model continues it with. The text is either edited in the text area or shown with tokens.

class Draft extends Pane {
  constructor(select, changed, edit) {
    super($("drafts"), select, changed);
    Object.assign(this, { promptIds: null, start: 0 });
    this.find(".body").classList.add("paper");
    this.find(".body").role = "group";
    this.find(".body").tabIndex = -1; // the focus goes there when the text area disappears
    this.find(".body").ariaLabel = "Text with tokens";
    this.view = new TokenView(this.find(".body"), this.find(".body"), (index, token) => this.replace(index, token));
    let closes = false; // whether a click only closes the popover
    this.find(".body").addEventListener("mousedown", () => (closes = popover.isPinned));
    this.find(".body").addEventListener("click", (event) => {
      const isOnToken = event.target.classList.contains("token");
      if (!isOnToken && !closes && getSelection().isCollapsed) edit(this);
    });
    this.editTool = this.addTool("Edit", () => edit(this));
    this.addTool("Copy", (button) => copyText(this.text, button));
    this.addTool("Look inside", (button) => this.lookInside(button));
  }

  get hasTokens() {
    return this.view.tokens.length > 0;
  }

  get text() {
    return this.view.box.hidden ? $("prompt").value : this.view.text;
  }

  get ids() {
    return [...this.promptIds, ...this.view.tokens.map(({ id }) => id)];
  }

  get usedTokens() {
    return this.promptIds && this.promptIds.length + this.view.tokens.length;
  }

  /** The state, for undo and for a reload. */
  save() {
    const { view, promptIds, start } = this;
    return { plain: view.plain, tokens: [...view.tokens], promptIds, start };
  }

  restore({ plain, tokens, promptIds, start }) {
    this.setText(plain);
    for (const token of tokens) this.view.push(token);
    this.view.flush();
    Object.assign(this, { promptIds, start });
  }

  /** Whether the model still has these tokens: it may be another one under the same name. */
  async knows({ promptIds, tokens }) {
    const lookUp = await loadVocabulary(this.select.value);
    const isKnown = (token) => {
      const { name, bytes } = lookUp(token.id);
      return name === token.name && String(bytes) === String(token.bytes);
    };
    return promptIds !== null && tokens.length > 0 && tokens.every(isKnown);
  }

  /** Make a text the prompt, without tokens. */
  setText(text) {
    this.view.setText(text);
    Object.assign(this, { promptIds: null, start: 0 });
    this.showStats("");
    this.showSeed(null);
  }

  /** Continue from the end of the text. */
  async extend() {
    const before = this.start, { length } = this.view.tokens;
    this.start = length;
    await this.generate();
    if (this.view.tokens.length === length) this.start = before; // nothing was added
  }

  /** Write the last continuation anew. */
  async regenerate() {
    this.view.truncate(this.start);
    await this.generate();
  }

  /** Continue with another token in place of the one at `index`. */
  async replace(index, token) {
    await this.stop();
    write.remember();
    const { alternatives, asked } = this.view.tokens[index];
    this.view.truncate(index);
    this.view.push({ ...token, alternatives, asked });
    this.view.focus(index);
    await this.extend();
  }

  async prepare() {
    this.lookUp = await loadVocabulary(this.select.value);
  }

  async generate() {
    const model = this.select.value, { slides, context_length, max_prompt_tokens = context_length } = this.model;
    // A model that slides forgets the oldest tokens while it writes. A prompt has to be cut before it is sent.
    const ids = this.hasTokens && (slides ? this.ids.slice(-max_prompt_tokens) : this.ids);
    const prompt = ids || this.view.plain;
    const limits = { max_tokens: settings.value("max_tokens"), logprobs: settings.value("logprobs") };
    const options = { ...limits, return_token_ids: true, return_tokens_as_token_ids: true };
    // Tokens go on as they are: a text that has slid has no BOS token.
    if (ids) options.add_special_tokens = false;
    await this.run("/v1/completions", { model, prompt, ...settings.body(), ...options }, this.view, (choice) => {
      if (!Array.isArray(prompt)) this.promptIds = choice.prompt_token_ids ?? this.promptIds;
      return tokensOfCompletion(choice, this.lookUp);
    });
  }

  /** Send a text. Of one that is too long, the newest tokens: a model that slides forgets the others. */
  async send(path, { body, signal }, onWait) {
    try {
      return await super.send(path, { body, signal }, onWait);
    } catch (error) {
      const { slides, context_length, max_prompt_tokens = context_length } = this.model;
      if (!error.isTooLong || !slides) throw error;
      const shorter = { ...body, truncate_prompt_tokens: max_prompt_tokens };
      return super.send(path, { body: shorter, signal }, onWait);
    }
  }

  /** The ids that the model sees at once, without an end of the text, after which it would begin another one. */
  get idsToLookAt() {
    const hasEnded = this.view.tokens.at(-1)?.name === END;
    return this.ids.slice(0, hasEnded ? -1 : undefined).slice(-this.model.context_length);
  }

  /** Open the page that shows the attention, attribution and layers of the model on this text. */
  async lookInside(button) {
    const tab = window.open("", "_blank"); // at once: a browser blocks tabs that open later
    if (!tab) return this.showError("The browser blocked the new tab. Allow pop-ups for this page.");
    tab.document.title = "Looking inside…";
    tab.document.documentElement.style.cssText = "color-scheme: light dark; font: 16px system-ui, sans-serif";
    tab.document.body.textContent = "The model reads the text. This takes a few seconds.";
    this.showError("");
    Object.assign(button, { textContent: "Looking…", disabled: true });
    try {
      const text = this.promptIds && !this.view.box.hidden ? { token_ids: this.idsToLookAt } : { text: this.text };
      const response = await request("/inspect", { body: { model: this.select.value, ...text } });
      const report = await fromNetwork(response.blob());
      tab.location.replace(URL.createObjectURL(report)); // never revoked, so that the tab can be reloaded
    } catch (error) {
      if (!(error instanceof RequestError)) throw error;
      tab.close();
      this.showError(error.message);
    } finally {
      Object.assign(button, { textContent: "Look inside", disabled: false });
    }
  }
}

const write = {
  isEditing: true,
  asksExample: false, // whether a model is writing one
  past: [], // states before each change, for undo

  start() {
    const changed = () => this.refresh(), edit = (draft) => this.edit(draft);
    this.drafts = [new Draft($("model"), changed, edit), new Draft($("other"), changed, edit)];
    $("continue").addEventListener("click", () => this.toggle());
    $("regenerate").addEventListener("click", () => this.regenerate());
    $("undo").addEventListener("click", () => this.undo());
    $("clear").addEventListener("click", () => this.clear());
    this.drafts[0].addExample("example", () => this.tryExample());
    $("prompt").addEventListener("input", () => this.onInput());
    $("prompt").addEventListener("keydown", (event) => this.onEnter(event));
    for (const { view } of this.drafts) view.box.addEventListener("keydown", (event) => this.onEnter(event));
    this.refresh();
  },

  get active() {
    return this.drafts.slice(0, $("compare").checked ? 2 : 1);
  },

  get isBusy() {
    return this.drafts.some(({ controller }) => controller);
  },

  onInput() {
    this.forgetErrors();
    this.refresh();
  },

  /** Enter continues: in the text area, or in the text with tokens outside of a token. */
  onEnter(event) {
    if (event.target !== event.currentTarget || !isPlainEnter(event)) return;
    event.preventDefault();
    if (!this.isBusy && !event.repeat && models.size) this.extend();
  },

  forgetErrors() {
    for (const draft of this.drafts) draft.forgetError();
  },

  /** Focus the text, in the form in which it is shown. */
  focusText() {
    const box = this.isEditing ? $("prompt") : this.drafts[0].view.box;
    box.focus({ preventScroll: true });
  },

  /** Fill in the beginning of a text of the model's kind. */
  async tryExample() {
    const [draft] = this.drafts, { example, id } = draft.model;
    if (this.asksExample) return;
    this.asksExample = true; // the button is not disabled, so that it keeps the focus
    try {
      const text = example ?? (await this.beginning(id)), hasFocus = document.activeElement === $("example");
      if ($("prompt").value !== "" || !this.isEditing) return; // the user has written meanwhile
      this.setText(text);
      if (hasFocus) this.focusText();
    } catch (error) {
      if (!(error instanceof RequestError)) throw error;
      draft.showError(error.message);
    } finally {
      this.asksExample = false;
    }
  },

  /** The first words that a model itself writes. */
  async beginning(model) {
    const body = { model, prompt: "", max_tokens: 8, temperature: 0.6, seed: 1 };
    const response = await request("/v1/completions", { body }), { choices } = await fromNetwork(response.json());
    return choices[0].text.trimStart().replace(/\uFFFD+$/, "");
  },

  /** The text without tokens, for a link. */
  get text() {
    return this.drafts[0].text;
  },

  toggle() {
    return this.isBusy ? this.stop() : this.extend();
  },

  stop() {
    return Promise.all(this.drafts.map((draft) => draft.stop()));
  },

  remember() {
    const { isEditing, drafts } = this;
    this.past.push({ isEditing, text: $("prompt").value, drafts: drafts.map((draft) => draft.save()) });
    this.refresh();
  },

  async undo() {
    await this.stop();
    if (!this.past.length) return; // two clicks while a request ran
    const { isEditing, text, drafts } = this.past.pop();
    $("prompt").value = text;
    this.drafts.forEach((draft, at) => draft.restore(drafts[at]));
    this.isEditing = isEditing;
    this.forgetErrors();
    this.refresh();
    if (!this.past.length) this.focusText(); // the button is disabled now
  },

  regenerate() {
    if (!settings.areValid()) return;
    this.remember();
    this.focusText(); // the button is disabled until the text ends
    return this.finish(this.active.map((draft) => draft.regenerate()));
  },

  extend() {
    if (!settings.areValid()) return;
    this.remember();
    if (this.isEditing) for (const draft of this.active) draft.setText($("prompt").value);
    const hasFocus = document.activeElement === $("prompt");
    this.isEditing = false;
    this.refresh();
    if (hasFocus) this.focusText();
    return this.finish(this.active.map((draft) => draft.extend()));
  },

  /** Wait for the drafts. A text to which nothing was added can be edited again. */
  async finish(requests) {
    await Promise.all(requests);
    const isUnchanged = !this.isEditing && !this.active.some(({ hasTokens }) => hasTokens);
    if (isUnchanged) {
      const hasFocus = document.activeElement === this.drafts[0].view.box;
      this.setText(this.text);
      if (hasFocus) this.focusText();
    }
    this.forgetSame();
  },

  /** Forget the last state for undo if nothing has changed since. */
  forgetSame() {
    const last = this.past.at(-1), { isEditing, drafts } = this;
    if (last?.isEditing !== isEditing) return;
    const hasTokens = ({ view }, { plain, tokens }) =>
      view.plain === plain && view.tokens.length === tokens.length && view.tokens.at(-1) === tokens.at(-1);
    const isSame = drafts.every((draft, at) => hasTokens(draft, last.drafts[at]));
    if (isEditing ? $("prompt").value !== last.text : !isSame) return;
    this.past.pop();
    this.refresh();
  },

  /** Edit a draft's text: its tokens become plain text, which is then the prompt of both drafts. */
  async edit(draft) {
    await this.stop();
    this.remember();
    this.setText(draft.text);
    $("prompt").focus();
    $("prompt").setSelectionRange($("prompt").value.length, $("prompt").value.length);
    $("prompt").scrollTop = $("prompt").scrollHeight;
  },

  async clear() {
    await this.stop();
    this.remember();
    this.setText("");
    this.forgetErrors();
    $("prompt").focus();
  },

  setText(text) {
    $("prompt").value = text;
    for (const draft of this.drafts) draft.setText(text);
    this.isEditing = true;
    this.refresh();
  },

  /** What a reload keeps besides the link: the tokens. */
  save() {
    return this.isEditing ? [] : this.active.map((draft) => draft.save());
  },

  /** Show the tokens that a reload has kept, of all drafts or of none. */
  async restore(drafts) {
    const { active } = this, text = $("prompt").value;
    if (drafts.length !== active.length) return;
    const known = await Promise.all(drafts.map((saved, at) => active[at].knows(saved)));
    const isUntouched = this.isEditing && !this.past.length && $("prompt").value === text;
    if (!known.every(Boolean) || !isUntouched) return;
    active.forEach((draft, at) => draft.restore(drafts[at]));
    this.isEditing = false;
    this.refresh();
    for (const draft of active) draft.scrollToEnd();
  },

  /** The ids of tokens mean nothing to another model: keep the text alone. */
  async changeModel(draft) {
    await this.stop();
    this.past = [];
    if (!this.isEditing) this.setText(draft.text);
    else this.refresh();
  },

  refresh() {
    const { isEditing, isBusy, active } = this;
    $("prompt").hidden = !isEditing;
    $("example").hidden = !isEditing || $("prompt").value !== "" || !models.size;
    const { example } = this.drafts[0].model ?? {};
    $("example").textContent = example ? `Try “${example.trim()}”` : "Try an example";
    this.drafts.forEach((draft, at) => {
      draft.root.hidden = at >= active.length;
      draft.view.box.hidden = draft.editTool.hidden = isEditing;
      draft.find(".pane-name").textContent = active.length > 1 ? draft.model?.id : "";
    });
    $("continue").textContent = isBusy ? "Stop" : "Continue";
    $("regenerate").disabled = isEditing || isBusy || !active.some(({ hasTokens }) => hasTokens);
    $("undo").disabled = !this.past.length;
    $("continue").disabled = !models.size;
  },
};
