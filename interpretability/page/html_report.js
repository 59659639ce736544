// Events: user input changes `state`; parts that depend on it are repainted in the next frame.

// ---- painting ------------------------------------------------------------------------------------------------------

const parts = []; // {key: dependencies, paint}
let waiting = false;

/** Repaint the parts whose dependencies have changed, once per frame. */
function update(changes = {}) {
  Object.assign(state, changes);
  if (waiting) return;
  waiting = true;
  requestAnimationFrame(() => {
    waiting = false;
    for (const part of parts) {
      const key = JSON.stringify([part.key(), colours.version, innerWidth]);
      if (key === part.was) continue;
      part.was = key;
      part.paint();
    }
  });
}

function painted(key, paint) {
  parts.push({ key, paint });
}

// ---- choosing ------------------------------------------------------------------------------------------------------

/** Unpack a head's weights the first time it is shown. */
async function openHead(layer, head) {
  const name = `${layer}-${head}`;
  if (isStored(layer, head) && !matrices.has(name)) {
    const bytes = new Uint8Array(await unpack(`w-${name}`));
    matrices.set(name, new Matrix(bytes));
  }
  return name;
}

function selectHead(layer, head) {
  state.wanted = `${layer}-${head}`;
  openHead(layer, head).then((name) => {
    if (name === state.wanted) update({ layer, head, from: "choice" }); // unless another head was chosen meanwhile
  });
}

/** Scroll the prompt, not the window, to a token. */
function reveal(token) {
  const box = $("tokens"), { offsetTop, offsetHeight } = box.children[token];
  const visible = offsetTop >= box.scrollTop && offsetTop + offsetHeight <= box.scrollTop + box.clientHeight;
  if (!visible) box.scrollTop = offsetTop - box.clientHeight / 2;
}

function lock(token) {
  reveal(token);
  update({ locked: true, position: token, focus: token, hovered: null, pair: null, from: "choice" });
}

function unlock() {
  update({ locked: false, hovered: null, pair: null });
  tip("");
}

function hover(token, from) {
  update({ hovered: token, from, pair: null });
}

function setView(view) {
  if (view === "attribution" && state.measure === "none") state.measure = "contribution";
  for (const name of ["attention", "attribution", "lens"]) $("inside").classList.toggle(name, name === view);
  const shown = { "all-heads": "attention attribution", "one-head": "attention", "lines-card": "attention" };
  Object.assign(shown, { "tokens-card": "attribution", "parts-card": "attribution", "lens-card": "lens" });
  for (const [id, views] of Object.entries(shown)) $(id).hidden = !views.split(" ").includes(view);
  $("direction").hidden = view !== "attention";
  document.querySelector(`#view [value=${view}]`).checked = true;
  update({ view });
}

// ---- the prompt ----------------------------------------------------------------------------------------------------

/** Index that a key moves to in a row of `count` elements; null for other keys. */
function step(key, place, count) {
  const to = { ArrowLeft: place - 1, ArrowRight: place + 1, Home: 0, End: count - 1 }[key];
  return to === undefined ? null : Math.max(0, Math.min(count - 1, to));
}

function startTokens() {
  const box = $("tokens"), buttons = facts.labels.map((text) => make("button", { type: "button", textContent: text }));
  box.append(...buttons);
  const tokenOf = (event) => buttons.indexOf(event.target);
  box.addEventListener("pointerover", (event) => {
    if (tokenOf(event) < 0) return;
    hover(tokenOf(event), "pointer");
    tip(tokenTip(tokenOf(event)), event.clientX, event.clientY);
  });
  box.addEventListener("pointerleave", () => {
    hover(null, "pointer");
    tip("");
  });
  box.addEventListener("focusin", (event) => {
    const token = tokenOf(event);
    if (token < 0 || !event.target.matches(":focus-visible")) return;
    hover(token, "focus");
    update({ focus: token });
    tipBelow(event.target, tokenTip(token));
  });
  box.addEventListener("focusout", () => {
    hover(null, "focus");
    tip("");
  });
  box.addEventListener("click", (event) => tokenOf(event) >= 0 && lock(tokenOf(event)));
  box.addEventListener("keydown", (event) => {
    const lines = { ArrowUp: -1, ArrowDown: 1 }[event.key];
    const to = lines ? beside(buttons, state.focus, lines) : step(event.key, state.focus, T);
    if (to === null) return;
    event.preventDefault();
    buttons[to].focus();
  });
  document.addEventListener("keydown", (event) => event.key === "Escape" && unlock());
  $("unlock").addEventListener("click", unlock);
}

/** The nearest button in the next line above or below. */
function beside(buttons, place, lines) {
  const boxes = buttons.map((button) => button.getBoundingClientRect()), own = boxes[place];
  const middle = (box) => box.left + box.width / 2;
  const others = range(buttons.length).filter((other) => lines * (boxes[other].top - own.top) > 2);
  if (!others.length) return place;
  const next = others.reduce((best, other) => (lines * (boxes[other].top - boxes[best].top) < 0 ? other : best));
  return others
    .filter((other) => Math.abs(boxes[other].top - boxes[next].top) < 2)
    .reduce((a, b) => (Math.abs(middle(boxes[b]) - middle(own)) < Math.abs(middle(boxes[a]) - middle(own)) ? b : a));
}

// ---- all heads -----------------------------------------------------------------------------------------------------

const MEASURES = {
  none: ["none", ""],
  contribution: ["contribution", "Bars: positive (orange) or negative (purple) contribution to the prediction."],
  entropy: ["entropy", "Bars: mean entropy of attention, in nats; high values mean broad attention."],
  normalised: ["normalized entropy", "Bars: entropy relative to uniform attention."],
  distance: ["distance", "Bars: mean distance to attended tokens."],
  previous: ["previous token", "Bars: mean weight of the previous token."],
  first: ["first token", "Bars: mean weight of the first token."],
  itself: ["itself", "Bars: mean weight of the token itself."],
};

function startGrid() {
  const grid = $("grid"), { layers, heads } = facts, size = Math.max(30, Math.min(56, Math.floor(360 / heads)));
  grid.style.gridTemplateColumns = `max-content repeat(${heads}, minmax(22px, ${size}px))`; // narrower in a narrow card
  const role = (name, tag, properties, ...inside) => {
    const element = make(tag, properties, ...inside);
    element.setAttribute("role", name);
    return element;
  };
  const numbers = range(heads).map((head) => role("columnheader", "div", { className: "at-head", textContent: head }));
  grid.append(role("row", "div", {}, role("columnheader", "div", { className: "at-layer", textContent: heads > 1 ? "head" : "" }), ...numbers));
  const cells = range(layers).map((layer) => range(heads).map((head) => {
    const canvas = make("canvas", { width: facts.side, height: facts.side });
    canvas.style.imageRendering = facts.side < 32 ? "pixelated" : "auto";
    const cell = role("gridcell", "div", {}, canvas, make("span", { className: "score" }, make("i")));
    cell.classList.toggle("small-only", !isStored(layer, head));
    cell.dataset.place = `${layer} ${head}`;
    return cell;
  }));
  cells.forEach((row, layer) => {
    grid.append(role("row", "div", {}, role("rowheader", "div", { className: "at-layer", textContent: `layer ${layer}` }), ...row));
  });
  const placeOf = (event) => event.target.closest("[role=gridcell]")?.dataset.place.split(" ").map(Number);
  grid.addEventListener("click", (event) => {
    const place = placeOf(event);
    if (place) choose(...place);
  });
  grid.addEventListener("pointerover", (event) => {
    const place = placeOf(event);
    tip(place ? headTip(...place) : "", event.clientX, event.clientY);
  });
  grid.addEventListener("pointerleave", () => tip(""));
  grid.addEventListener("focusin", (event) => {
    if (event.target.matches(":focus-visible")) tipBelow(event.target, headTip(...placeOf(event)));
  });
  grid.addEventListener("focusout", () => tip(""));
  grid.addEventListener("keydown", (event) => {
    const [layer, head] = placeOf(event), rows = { ArrowUp: -1, ArrowDown: 1 }[event.key];
    if (event.key === "Enter" || event.key === " ") choose(layer, head);
    else if (rows) focusCell(Math.max(0, Math.min(layers - 1, layer + rows)), head);
    else if (step(event.key, head, heads) !== null) focusCell(layer, step(event.key, head, heads));
    else return;
    event.preventDefault();
  });
  function focusCell(layer, head) {
    update({ cell: [layer, head] });
    cells[layer][head].tabIndex = 0;
    cells[layer][head].focus();
  }
  function choose(layer, head) {
    update({ cell: [layer, head] });
    selectHead(layer, head);
  }
  for (const [name, [text]] of Object.entries(MEASURES)) $("measure").append(make("option", { value: name, textContent: text }));
  $("measure").addEventListener("change", (event) => update({ measure: event.target.value }));
  painted(() => [], () => paintThumbnails(cells));
  painted(() => [state.layer, state.head, state.cell, state.measure], () => paintCells(cells));
}

function headTip(layer, head) {
  const score = (name) => facts.scores[name][layer][head].toFixed(2);
  const suffix = isStored(layer, head) ? "" : "\nthumbnail and scores only";
  return `${headName(layer, head)}\n${facts.summaries[layer][head]}\nentropy ${score("entropy")} · distance ${score("distance")}\n` +
    `previous ${score("previous")} · first ${score("first")} · itself ${score("itself")}\n` +
    `contribution ${signed(facts.attribution.heads[layer][head])}${suffix}`;
}

function paintThumbnails(cells) {
  const { side } = facts;
  cells.forEach((row, layer) => row.forEach((cell, head) => {
    const image = new ImageData(side, side), pixels = new Uint32Array(image.data.buffer), index = thumbnailIndex(layer, head);
    for (let at = 0; at < pixels.length; at++) {
      const byte = index(Math.floor(at / side), at % side);
      if (byte >= 0) pixels[at] = colours.heat.packed[byte];
    }
    cell.firstChild.getContext("2d").putImageData(image, 0, 0);
  }));
}

function paintCells(cells) {
  const { measure } = state, values = measure === "contribution" ? facts.attribution.heads : facts.scores[measure];
  const shares = !["contribution", "entropy", "distance"].includes(measure);
  const top = shares ? 1 : Math.max(...values.flat().map(Math.abs), 1e-9);
  $("measure").value = measure;
  $("measure-note").textContent = MEASURES[measure][1] || "Hover over a head for its scores, click to open it. Rows are queries, columns are keys.";
  cells.forEach((row, layer) => row.forEach((cell, head) => {
    const suffix = isStored(layer, head) ? "" : ", thumbnail and scores only";
    cell.ariaSelected = layer === state.layer && head === state.head;
    cell.tabIndex = layer === state.cell[0] && head === state.cell[1] ? 0 : -1;
    cell.ariaLabel = `layer ${layer} head ${head}, entropy ${facts.scores.entropy[layer][head].toFixed(2)}, ${facts.summaries[layer][head]}${suffix}`;
    const score = cell.lastChild, filled = score.firstChild, share = values ? values[layer][head] / top : 0;
    score.hidden = !values;
    const middle = measure === "contribution" ? 50 : 0, width = Math.abs(share) * (middle || 100);
    Object.assign(filled.style, { left: `${share < 0 ? middle - width : middle}%`, width: `${width}%` });
    filled.style.background = middle ? `var(--${share < 0 ? "minus" : "plus"})` : "var(--heat-3)";
  }));
}

// ---- start ---------------------------------------------------------------------------------------------------------

function startExplorer(thumbnails) {
  const { start, layers, heads } = facts;
  Object.assign(state, start, { thumbnails, locked: false, hovered: null, pair: null, direction: "from", measure: "none" });
  Object.assign(state, { depth: layers, focus: start.position, cell: [start.layer, start.head] });
  $("size").textContent = `${T} tokens · ${layers} ${layers > 1 ? "layers" : "layer"} with ${heads} ${heads > 1 ? "heads" : "head"}`;
  $("banner").textContent = facts.banner;
  $("banner").hidden = !facts.banner;
  $("layer").max = layers - 1;
  $("depth").max = layers;
  const pointed = (query, key, event) => {
    if (!event || !matrix()) {
      hover(null, "map");
      return tip("");
    }
    hover(state.direction === "from" ? query : key, "map");
    update({ pair: [query, key] });
    tip(pairTip(query, key), event.clientX, event.clientY);
  };
  const clicked = (query, key) => matrix() && lock(state.direction === "from" ? query : key);
  const map = (state.map = new Heatmap($("map"), pointed, clicked));
  const openedKey = () => [state.view, state.layer, state.head, Boolean(matrix()), state.direction];
  startTokens();
  startGrid();
  painted(() => [openedKey(), at(), state.locked, state.depth, state.focus], paintTokens);
  painted(() => [openedKey(), at(), state.locked, state.depth], paintStatus);
  painted(() => [at()], paintNext);
  painted(() => openedKey().slice(0, 4), () => state.view === "attention" && paintHead(map));
  painted(() => [openedKey(), at(), state.pair], () => state.view === "attention" && paintCross(map));
  painted(() => [openedKey(), at()], () => state.view === "attention" && paintLines());
  painted(() => [state.view], () => state.view === "attribution" && paintParts(openFromParts));
  painted(() => [state.view, at(), state.depth], () => state.view === "lens" && paintLens((depth) => update({ depth })));
  startControls();
  setView(start.view);
  reveal(start.position);
  selectHead(start.layer, start.head);
}

function openFromParts(layer, head) {
  setView("attention");
  update({ cell: [layer, head] });
  selectHead(layer, head);
}

function startControls() {
  $("view").addEventListener("change", (event) => setView(event.target.value));
  $("direction").addEventListener("change", (event) => update({ direction: event.target.value, from: "choice" }));
  $("layer").addEventListener("input", (event) => selectHead(Number(event.target.value), state.head));
  $("depth").addEventListener("input", (event) => update({ depth: Number(event.target.value) }));
  const lines = $("lines");
  const tokenAt = (event) => {
    if (!state.sides) return null;
    const place = lines.getBoundingClientRect(), x = (event.clientX - place.left) / place.width;
    if (x > 0.35 && x < 0.65) return null;
    const found = state.sides[x < 0.5 ? 0 : 1].tokens.find(([, y]) => Math.abs(event.clientY - place.top - y) <= 8.5);
    return found ? found[0] : null;
  };
  lines.addEventListener("pointermove", (event) => {
    const token = tokenAt(event);
    hover(token, "lines");
    tip(token === null ? "" : tokenTip(token), event.clientX, event.clientY);
  });
  lines.addEventListener("pointerleave", () => {
    hover(null, "lines");
    tip("");
  });
  lines.addEventListener("click", (event) => tokenAt(event) !== null && lock(tokenAt(event)));
}

startTheme(() => {
  readColours();
  update();
});
if (facts) unpack("thumbnails").then((buffer) => startExplorer(new Uint8Array(buffer)));
window.addEventListener("resize", () => update());
