// The popover of a token: its probability, its rank, and the alternatives, which can replace it.

const popover = {
  view: null,
  index: -1,
  isPinned: false, // opened by focus or a click: it stays when the pointer moves away
  timer: null,

  /** Show the popover of a token under it. */
  show(view, index, isPinned) {
    view.flush();
    clearTimeout(this.timer);
    this.unmark();
    Object.assign(this, { view, index, isPinned });
    const token = view.tokens[index], span = view.spans[index];
    span.classList.add("at");
    $("popover").replaceChildren(...this.content(token));
    $("popover").hidden = false;
    this.place(span);
  },

  hide() {
    clearTimeout(this.timer);
    this.unmark();
    Object.assign(this, { view: null, index: -1, isPinned: false });
    $("popover").hidden = true;
  },

  unmark() {
    this.view?.spans[this.index]?.classList.remove("at");
  },

  hover(view, index) {
    if (this.isPinned) return;
    if (this.view === view && this.index === index) clearTimeout(this.timer);
    else this.show(view, index, false);
  },

  /** The pointer has left: hide soon, unless it goes to the popover. */
  leave() {
    if (this.view === null || this.isPinned) return;
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.hide(), 250);
  },

  onBlur(event) {
    if (this.isPinned && !$("popover").contains(event.relatedTarget)) this.hide();
  },

  /** Move the focus from a token to its alternatives. */
  enter(view, index) {
    this.show(view, index, true);
    $("popover").querySelector("button")?.focus();
  },

  content(token) {
    const share = probabilityOf(token), { alternatives, asked } = token;
    const rank = alternatives.findIndex((other) => isSame(other, token)), shown = alternatives.length;
    const about = `rank ${rank + 1} ${rank < asked ? `of the ${shown} shown` : "or lower"}`;
    const name = make("b", { id: "popover-name", className: "mono", textContent: labelOf(token) });
    const number = make("span", { className: "number", textContent: share === null ? "" : percent(share) });
    const note = make("p", { className: "quiet", textContent: asked ? about : "no alternatives were asked for" });
    const largest = Math.max(...alternatives.map(probabilityOf));
    const lines = alternatives.map((other) => this.line(other, isSame(other, token), largest));
    const hint = this.view.pick && shown > 1 ? "Choose one to continue from there." : "";
    const list = make("ol", { className: "bars" }, ...lines);
    return [make("p", {}, name, number), note, list, make("p", { className: "quiet", textContent: hint })];
  },

  /** One alternative; its bar is relative to the largest one. */
  line(other, isChosen, largest) {
    const share = probabilityOf(other), bar = make("i");
    bar.style.width = `${(100 * share) / largest}%`;
    const parts = [
      make("span", { className: "name mono", textContent: labelOf(other) }),
      make("span", { className: "track" }, bar),
      make("span", { className: "number", textContent: percent(share) }),
    ];
    if (!this.view.pick) return make("li", { className: isChosen ? "line chosen" : "line" }, ...parts);
    const button = make("button", { type: "button", className: isChosen ? "line chosen" : "line" }, ...parts);
    if (isChosen) button.setAttribute("aria-current", "true");
    button.addEventListener("click", () => {
      const { view, index } = this;
      this.hide();
      view.pick(index, other);
    });
    return make("li", {}, button);
  },

  /** Below the token where there is room, otherwise above it; always inside the window. */
  place(span) {
    const box = $("popover"), own = [...span.getClientRects()].at(-1) ?? span.getBoundingClientRect();
    const left = Math.max(6, Math.min(own.left - 8, document.documentElement.clientWidth - box.offsetWidth - 6));
    const isAbove = own.bottom + box.offsetHeight > innerHeight && own.top > box.offsetHeight;
    box.style.transform = `translate(${left}px, ${isAbove ? own.top - box.offsetHeight : own.bottom}px)`;
  },

  onKey(event) {
    const buttons = [...$("popover").querySelectorAll("button")], at = buttons.indexOf(document.activeElement);
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (step) buttons[(at + step + buttons.length) % buttons.length].focus();
    else if (event.key === "Escape") this.view.spans[this.index].focus();
    else return;
    event.preventDefault();
    event.stopPropagation(); // Escape leaves the popover, and stops nothing
  },

  start() {
    const box = $("popover");
    box.addEventListener("pointerenter", () => clearTimeout(this.timer));
    box.addEventListener("pointerleave", () => this.leave());
    box.addEventListener("keydown", (event) => this.onKey(event));
    box.addEventListener("focusout", (event) => {
      if (!box.contains(event.relatedTarget) && !event.relatedTarget?.classList.contains("token")) this.hide();
    });
    box.addEventListener("mousedown", (event) => event.preventDefault()); // a click takes no focus from the token
    for (const event of ["scroll", "resize"]) {
      window.addEventListener(event, () => this.view && this.place(this.view.spans[this.index]), true);
    }
  },
};
