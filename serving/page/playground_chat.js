// Chat: messages to a model with a chat template. Each model that is compared has a conversation of its own.

class Conversation extends Pane {
  constructor(select, changed) {
    super($("conversations"), select, changed);
    this.messages = []; // {role, content, item}
    this.unseen = 0; // the first messages, which the model no longer sees
    this.list = make("ol", { className: "messages", ariaLabel: "Conversation" });
    this.find(".body").append(this.list);
    this.clear();
  }

  clear() {
    this.truncate(0);
    this.showError("");
    this.showSeed(null);
    this.showStats("");
  }

  /** Keep the first `count` messages. */
  truncate(count) {
    const removed = this.messages.splice(count);
    if (count <= this.unseen) this.unseen = 0;
    if (removed.some(({ item }) => item.contains(document.activeElement))) $("message").focus();
    for (const { item } of removed) item.remove();
    this.root.classList.toggle("empty", !count);
  }

  /** An answer is text: the token that ends it, and other special tokens, are not shown. */
  shows({ bytes }) {
    return bytes !== undefined;
  }

  async prepare() {
    this.endNames = await loadEndNames(this.select.value);
  }

  /** The messages as [role, content], for a link. */
  get asPairs() {
    return this.messages.map(({ role, content }) => [role, content]);
  }

  /** Show the messages of a link; tokens: those of each message, or null, if they are known. */
  restore(pairs, tokens = []) {
    this.clear();
    pairs.forEach(([role, content], at) => {
      const { view } = this.add(role, content);
      if (tokens[at]) for (const token of tokens[at]) view.push(token);
      else view?.setText(content);
      view?.flush();
    });
    this.scrollToEnd();
  }

  async ask(content) {
    await this.stop();
    this.add("user", content);
    if (await this.answer()) return;
    this.truncate(this.messages.length - 1); // it was not answered: many templates want an answer before the next
    if (chat.active.length === 1 && $("message").value === "") $("message").value = content;
    this.changed();
  }

  /** Ask the model; returns whether it has answered. */
  async answer() {
    const model = this.select.value, system = $("system").value.trim(), n = settings.value("logprobs");
    const asked = this.messages.map(({ role, content }) => ({ role, content }));
    const messages = system ? [{ role: "system", content: system }, ...asked] : asked;
    const options = { max_completion_tokens: settings.value("max_tokens"), logprobs: true, top_logprobs: n };
    const message = this.add("assistant", "");
    const body = { model, messages, ...settings.body(), ...options };
    const hasEnded = await this.run("/v1/chat/completions", body, message.view, (choice) => {
      message.content += choice.delta?.content ?? "";
      return tokensOfChat(choice, this.endNames);
    });
    this.cutStop(message);
    const isAnswered = hasEnded || message.view.tokens.length > 0;
    if (!isAnswered) this.truncate(this.messages.length - 1);
    this.changed();
    return isAnswered;
  }

  /** Send the conversation. If it is too long, forget the older half of its turns, as often as needed. */
  async send(path, { body, signal }, onWait) {
    const asked = `${body.model}\n${$("system").value}`;
    if (this.asked !== asked) this.unseen = 0; // with another model or system message, more may fit
    this.asked = asked;
    const before = this.unseen, isSystem = ({ role }) => role === "system";
    const system = body.messages.filter(isSystem), said = body.messages.filter((message) => !isSystem(message));
    for (;;) {
      const messages = [...system, ...said.slice(this.unseen)];
      try {
        return await super.send(path, { body: { ...body, messages }, signal }, onWait);
      } catch (error) {
        const turns = [...said.keys()].filter((at) => at >= this.unseen && said[at].role === "user");
        if (!error.isTooLong || turns.length < 2) {
          this.unseen = before;
          throw error;
        }
        this.unseen = turns[Math.ceil(turns.length / 2)];
      }
    }
  }

  get note() {
    return this.unseen ? `the model no longer sees the first ${this.unseen} messages` : "";
  }

  /** Remove tokens of a stop string: they are no part of the message. */
  cutStop({ content, view }) {
    let count = view.tokens.length;
    for (let length = view.text.length; count && length > content.length; ) length -= view.tokens[--count].text.length;
    if (view.text.length > content.length) view.truncate(count);
  }

  /** Ask again for the answer at `index`, and forget what follows it. */
  async regenerate(index) {
    if (!settings.areValid()) return;
    await this.stop();
    const removed = this.messages.slice(index);
    this.truncate(index);
    if (await this.answer()) return;
    this.messages.push(...removed);
    this.list.append(...removed.map(({ item }) => item));
  }

  add(role, content) {
    const text = make("div", { className: "message-text", textContent: role === "user" ? content : "" });
    const name = make("p", { className: "who", textContent: role === "user" ? "You" : this.model.id });
    const tools = make("div", { className: "bar tools" }), item = make("li", { className: role }, name, text, tools);
    const message = { role, content, item };
    if (role === "assistant") {
      text.role = "group";
      text.ariaLabel = "Message with tokens";
      message.view = new TokenView(text, this.find(".body"));
    }
    const tool = (label, act) => {
      const button = make("button", { type: "button", className: "small", textContent: label });
      button.addEventListener("click", () => act(button));
      tools.append(button);
    };
    if (role === "user") tool("Edit", () => this.edit(message));
    else tool("Regenerate", () => this.regenerate(this.messages.indexOf(message)));
    tool("Copy", (button) => copyText(message.content, button));
    this.messages.push(message);
    this.list.append(item);
    this.root.classList.remove("empty");
    this.scrollToEnd();
    return message;
  }

  /** Edit a message in place. Sending it replaces the message and what follows it. */
  edit(message) {
    const { item, content } = message, parts = [...item.children];
    const area = make("textarea", { value: content, ariaLabel: "Edited message", rows: 3 });
    const close = () => {
      item.replaceChildren(...parts);
      item.querySelector("button").focus();
    };
    const send = async () => {
      if (!area.value.trim() || !settings.areValid()) return;
      await this.stop();
      this.truncate(this.messages.indexOf(message));
      await this.ask(area.value);
    };
    const button = (textContent, act, className = "small") => {
      const one = make("button", { type: "button", textContent, className });
      one.addEventListener("click", act);
      return one;
    };
    const buttons = [button("Send edited", send, "small primary"), button("Cancel", close)];
    const hint = $("edit-keys").content.cloneNode(true);
    const later = this.messages.length - 1 - this.messages.indexOf(message);
    hint.querySelector(".replaces").textContent = later > 1 ? `; replaces the ${later} messages after it` : "";
    area.addEventListener("keydown", (event) => {
      if (event.key === "Escape") close();
      else if (isPlainEnter(event) || (event.key === "Enter" && (event.ctrlKey || event.metaKey))) send();
      else return;
      event.preventDefault();
      event.stopPropagation();
    });
    item.replaceChildren(parts[0], area, make("div", { className: "bar tools" }, ...buttons, hint));
    area.focus();
  }
}

const chat = {
  start() {
    const changed = () => this.refresh();
    this.conversations = [new Conversation($("model"), changed), new Conversation($("other"), changed)];
    $("send").addEventListener("click", () => this.toggle());
    $("message").addEventListener("keydown", (event) => {
      if (!isPlainEnter(event)) return; // Ctrl Enter is a key of the whole page
      event.preventDefault();
      if (!this.isBusy && models.size) this.send();
    });
    $("message").addEventListener("input", () => this.onInput());
    this.conversations[0].addExample("chat-example", () => this.tryExample());
    $("new-chat").addEventListener("click", () => this.clear());
    this.refresh();
  },

  onInput() {
    this.forgetErrors();
    this.refresh();
  },

  /** Focus the message, without scrolling. */
  focusText() {
    $("message").focus({ preventScroll: true });
  },

  forgetErrors() {
    for (const conversation of this.conversations) conversation.forgetError();
  },

  tryExample() {
    $("message").value = this.example;
    $("message").focus();
    this.refresh();
  },

  /** A message that fits the model: what its run samples with, or what fits every chat. */
  get example() {
    return this.conversations[0].model?.example ?? "Hello!";
  },

  get active() {
    return this.conversations.slice(0, $("compare").checked ? 2 : 1);
  },

  get isBusy() {
    return this.conversations.some(({ controller }) => controller);
  },

  toggle() {
    return this.isBusy ? this.stop() : this.send();
  },

  stop() {
    return Promise.all(this.conversations.map((conversation) => conversation.stop()));
  },

  send() {
    const content = $("message").value;
    if (!content.trim() || !settings.areValid()) return $("message").focus();
    $("message").value = "";
    for (const conversation of this.active) conversation.ask(content);
  },

  async clear() {
    await this.stop();
    for (const conversation of this.active) conversation.clear();
    $("message").focus();
    this.refresh();
  },

  refresh() {
    const { active } = this;
    this.conversations.forEach((conversation, at) => {
      conversation.root.hidden = at >= active.length;
      conversation.find(".pane-name").textContent = active.length > 1 ? conversation.model?.id : "";
    });
    const isEmpty = !active.some(({ messages }) => messages.length) && $("message").value === "";
    $("chat-example").hidden = !isEmpty || !models.size;
    $("chat-example").textContent = `Try “${this.example.trim()}”`;
    $("send").disabled = !models.size;
    $("send").textContent = this.isBusy ? "Stop" : "Send";
  },
};
