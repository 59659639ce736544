// Generated text, token by token: each colored by its probability, appended once per frame, reachable with arrow keys.

const LONG = 200; // tokens in a block, beyond which it is split
const FLOORS = [0.9, 0.6, 0.3, 0.1, 0.03, 0.01, 0]; // the least probability of each color

const probabilityOf = ({ logprob }) => (logprob === null ? null : Math.exp(logprob));
const percent = (share) => (share < 0.00005 ? "< 0.01%" : `${(100 * share).toFixed(share < 0.0995 ? 2 : 1)}%`);
const hex = (bytes) => Array.from(bytes, (byte) => `\\x${byte.toString(16).padStart(2, "0")}`).join("");

/** Text of a token on its own: · is a space, \xf0 a byte of a character that spans several tokens. */
function labelOf({ name, bytes }) {
  if (name !== undefined) return name;
  try {
    const text = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(bytes);
    return text.replaceAll(" ", "·").replaceAll("\n", "↵").replaceAll("\t", "⇥");
  } catch (error) {
    if (error instanceof TypeError) return hex(bytes);
    throw error;
  }
}

/** What stands in the text for a token without text. The popover has the names of special tokens. */
function markOf({ name, bytes }) {
  if (name === undefined) return hex(bytes);
  return name === END ? name : "◇";
}

/** Text followed by tokens, in an element. */
class TokenView {
  /** scroller: scrolls as the text grows. pick(index, alternative): replaces a token; null if that is impossible. */
  constructor(box, scroller, pick = null) {
    Object.assign(this, { box, scroller, pick, tokens: [], spans: [] });
    Object.assign(this, { drawn: 0, active: -1, frame: null, hovered: null });
    // Not pointerover, which also comes when the text moves under a pointer at rest.
    box.addEventListener("pointermove", (event) => this.onHover(event));
    box.addEventListener("pointerleave", () => popover.leave());
    box.addEventListener("focusin", (event) => this.onFocus(event));
    box.addEventListener("focusout", (event) => popover.onBlur(event));
    box.addEventListener("keydown", (event) => this.onKey(event));
    new ResizeObserver(() => this.join()).observe(box);
    box.append(make("div"));
    this.setText("");
  }

  /** Start anew with a text without tokens. */
  setText(text) {
    this.truncate(0);
    this.plain = text;
    this.box.replaceChildren(make("div", {}, make("span", { className: "plain", textContent: text })));
  }

  get text() {
    return this.plain + this.tokens.map(({ text }) => text).join("");
  }

  /** Append a token; it is drawn with the next frame. */
  push(token) {
    token.text = token.bytes ? this.decoder.decode(token.bytes, { stream: true }) : "";
    this.tokens.push(token);
    this.frame ??= requestAnimationFrame(() => this.flush());
  }

  /** Draw the tokens that have come since the last frame. Only the last block is laid out again. */
  flush() {
    cancelAnimationFrame(this.frame);
    this.frame = null;
    const { box, scroller } = this, follows = scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < 60;
    for (const token of this.tokens.slice(this.drawn)) {
      this.draw(token, box.lastElementChild);
      if (token.text.endsWith("\n")) box.append(make("div"));
    }
    this.drawn = this.tokens.length;
    if (box.lastElementChild.childElementCount > LONG) this.split();
    if (this.active < 0 && this.drawn) this.activate(0);
    if (follows) scroller.scrollTop = scroller.scrollHeight;
  }

  /** Move the last row of a long paragraph to a block of its own, so that a browser lays out the rest only once. */
  split() {
    const block = this.box.lastElementChild, row = [];
    let first = block.lastElementChild;
    while (first.previousElementSibling?.offsetTop === first.offsetTop) first = first.previousElementSibling;
    if (first === block.firstElementChild) return; // a single row, or hidden
    for (let node = first; node; node = node.nextSibling) row.push(node);
    this.box.append(make("div", { className: "split" }, ...row));
  }

  /** With another width, rows begin elsewhere: undo all splits. */
  join() {
    if (this.width !== this.box.clientWidth) {
      for (const block of this.box.querySelectorAll(".split")) {
        block.previousElementSibling.append(...block.childNodes);
        block.remove();
      }
    }
    this.width = this.box.clientWidth;
  }

  /** Draw a token at the end of a line. The space before a word stays without color, so that words look apart. */
  draw(token, line) {
    const share = probabilityOf(token), isWord = /^ \S/.test(token.text);
    const span = make("span", { className: "token", textContent: token.text.slice(isWord), tabIndex: -1 });
    this.spans.push(span);
    line.append(...(isWord ? [" ", span] : [span]));
    if (share !== null) span.classList.add(`p${FLOORS.findIndex((floor) => share >= floor)}`);
    // Marks are drawn by the style sheet: they are no part of the text that the user selects.
    if (!token.text) span.dataset.mark = markOf(token);
    else if (token.text.startsWith("\n")) span.dataset.mark = "↵";
    else if (/^[\p{M}\p{C}\p{Zl}\p{Zp}]+$/u.test(token.text)) span.dataset.mark = "◌"; // no width of its own
  }

  /** Keep the first `count` tokens. */
  truncate(count) {
    const { box, tokens, spans } = this;
    if (popover.view === this) popover.hide();
    this.flush();
    tokens.length = this.drawn = count;
    const removed = spans.splice(count)[0], line = removed?.parentElement;
    if (line) {
      while (line.nextSibling) line.nextSibling.remove();
      while (removed.nextSibling) removed.nextSibling.remove();
      if (removed.previousSibling?.nodeType === Node.TEXT_NODE) removed.previousSibling.remove();
      removed.remove();
    }
    if (this.active >= count) this.active = -1;
    if (count && this.active < 0) this.activate(count - 1);
    this.decoder = new TextDecoder("utf-8", { ignoreBOM: true });
    for (const { bytes } of tokens) if (bytes) this.decoder.decode(bytes, { stream: true }); // a character may be open
  }

  /** Make one token the stop of the Tab key. Only this one is a button: a screen reader reads the rest as text. */
  activate(index) {
    const before = this.spans[this.active], span = this.spans[index];
    if (before) {
      before.tabIndex = -1;
      for (const name of ["role", "aria-haspopup", "aria-label"]) before.removeAttribute(name);
    }
    Object.assign(span, { tabIndex: 0, role: "button", ariaHasPopup: "dialog", ariaLabel: this.describe(index) });
    this.active = index;
  }

  describe(index) {
    const share = probabilityOf(this.tokens[index]);
    const place = `token ${index + 1} of ${this.tokens.length}`;
    return [labelOf(this.tokens[index]), ...(share === null ? [] : [percent(share)]), place].join(", ");
  }

  /** Focus a token without opening its popover. */
  focus(index) {
    this.flush();
    this.isQuiet = true;
    this.spans[index].focus();
    this.isQuiet = false;
    this.activate(index);
  }

  indexOf(event) {
    return event.target.classList.contains("token") ? this.spans.indexOf(event.target) : -1;
  }

  onHover(event) {
    if (event.target === this.hovered && popover.view === this) return;
    this.hovered = event.target;
    const index = this.indexOf(event);
    if (index >= 0 && event.pointerType !== "touch") popover.hover(this, index);
    else popover.leave();
  }

  onFocus(event) {
    const index = this.indexOf(event);
    if (index < 0 || this.isQuiet) return;
    this.activate(index);
    popover.show(this, index, true);
  }

  onKey(event) {
    const index = this.indexOf(event), last = this.spans.length - 1;
    if (index < 0) return;
    const to = {
      ArrowLeft: () => Math.max(0, index - 1),
      ArrowRight: () => Math.min(last, index + 1),
      ArrowUp: () => this.beside(index, -1),
      ArrowDown: () => this.beside(index, 1),
      Home: () => 0,
      End: () => last,
    }[event.key];
    if (to) this.spans[to()].focus();
    else if (event.key === "Enter" || event.key === " ") popover.enter(this, index);
    else return;
    event.preventDefault();
    event.stopPropagation();
  }

  /** The nearest token in the next line above (-1) or below (1). */
  beside(index, direction) {
    const place = (at) => this.spans[at].getClientRects()[0] ?? new DOMRect();
    const own = place(index), distance = (at) => Math.abs(place(at).left - own.left);
    let at = index, best = index, top = null;
    while (this.spans[at + direction] && (top === null || Math.abs(place(at + direction).top - top) < 4)) {
      at += direction;
      if (top === null && Math.abs(place(at).top - own.top) > 4) top = place(at).top;
      if (top !== null && (best === index || distance(at) < distance(best))) best = at;
    }
    return best;
  }
}
