// Views: `facts` has the values to show, `state` the selection. html_report.js decides when to paint.

const facts = $("facts") && JSON.parse($("facts").textContent);
const T = facts?.labels.length ?? 0;
const MANY = 36; // tokens on each side of the attention lines
const LISTED = 15; // contributions
const matrices = new Map(); // "layer-head" -> Matrix, for opened heads
const state = {};

const range = (count) => Array.from({ length: count }, (_, at) => at);
const numbered = (at) => `${at} ${facts.labels[at]}`;
const headName = (layer, head) => `Layer ${layer}, head ${head}`;
const depthName = (depth) => (depth ? `layer ${depth - 1}` : "embedding");

/** Weights of a head as bytes b, (b/255)² each; -1 for masked keys above the diagonal. */
class Matrix {
  constructor(bytes) {
    this.bytes = bytes;
  }
  at(query, key) {
    if (facts.bidirectional) return this.bytes[query * T + key];
    return key > query ? -1 : this.bytes[(query * (query + 1)) / 2 + key];
  }
  weight(query, key) {
    return (Math.max(0, this.at(query, key)) / 255) ** 2;
  }
}

const isStored = (layer, head) => $(`w-${layer}-${head}`) !== null;
const matrix = () => matrices.get(`${state.layer}-${state.head}`);

/** The current token: locked, else hovered, else last chosen. */
const at = () => (state.locked ? state.position : (state.hovered ?? state.position));

/** The byte between the current token and another one, in the chosen direction. */
const between = (other, from = at()) => (state.direction === "from" ? matrix().at(from, other) : matrix().at(other, from));
const asWeight = (byte) => ((Math.max(0, byte) / 255) ** 2).toFixed(2);

/** Tokens with the largest weights, in descending order. */
function strongest(count, from = at()) {
  const all = range(T).filter((other) => between(other, from) > 0);
  return all.sort((a, b) => between(b, from) - between(a, from) || a - b).slice(0, count);
}

/** Probability of the actual next token after `position`, after `depth` layers. */
const nextProbability = (depth, position) => facts.next_probability[depth * (T - 1) + position];

// ---- the prompt ----------------------------------------------------------------------------------------------------

/** The color index of a token (-1 for none) and its value in words. */
function tokenValue(token) {
  if (state.view === "attention") {
    const byte = matrix() ? between(token) : -1;
    return [byte, byte < 0 ? "masked" : `weight ${asWeight(byte)}`];
  }
  if (state.view === "attribution") {
    const { by_token } = facts.attribution;
    if (!by_token) return [-1, ""];
    const top = Math.max(...by_token.map(Math.abs), 1e-9);
    return [signedIndex(by_token[token], top), `contribution ${signed(by_token[token])}`];
  }
  if (token === T - 1) return [-1, "end of the prompt"];
  const share = nextProbability(state.depth, token);
  return [Math.round(255 * Math.sqrt(share)), `${percent(share)} for the next token ‘${facts.labels[token + 1]}’`];
}

function paintTokens() {
  const ramp = state.view === "attribution" ? colours.signed : colours.heat;
  const shown = at(), buttons = $("tokens").children;
  for (let token = 0; token < T; token++) {
    const [index, words] = tokenValue(token), button = buttons[token];
    button.style.background = index < 0 ? "transparent" : ramp.css[index];
    button.style.color = index < 0 ? "" : ramp.ink[index];
    button.classList.toggle("at", token === shown);
    button.ariaPressed = state.locked && token === state.position;
    button.ariaLabel = `${numbered(token)}, ${words}`;
    button.tabIndex = token === state.focus ? 0 : -1;
  }
}

/** The text of a token's tip. */
function tokenTip(token) {
  if (state.view !== "attention" || !matrix()) return `${numbered(token)}\n${tokenValue(token)[1]}`;
  if (state.locked) {
    const [query, key] = state.direction === "from" ? [state.position, token] : [token, state.position];
    return pairTip(query, key);
  }
  const verb = state.direction === "from" ? "attends to" : "is attended to by";
  const rows = strongest(4, token).map((other) => `${asWeight(between(other, token))}  ${numbered(other)}`);
  return `${numbered(token)} ${verb}\n${rows.join("\n") || "nothing"}`;
}

function pairTip(query, key) {
  const byte = matrix().at(query, key);
  return `${numbered(query)} → ${numbered(key)}\n${byte < 0 ? "masked" : asWeight(byte)}`;
}

function paintStatus() {
  const shown = at(), lock = state.locked ? " (locked)" : "";
  let words = `Token ${numbered(shown)}${lock}: ${tokenValue(shown)[1]}.`;
  if (state.view === "attention") {
    const verb = state.direction === "from" ? "attends to" : "is attended to by";
    const most = matrix() ? strongest(3).map((other) => `${numbered(other)} (${asWeight(between(other))})`) : [];
    words = `In ${headName(state.layer, state.head).toLowerCase()}, token ${numbered(shown)}${lock} ${verb} ${most.join(", ") || "nothing"}.`;
    if (!matrix()) words = `${headName(state.layer, state.head)} is loading.`;
    if (!isStored(state.layer, state.head)) words = `${headName(state.layer, state.head)} is not stored in this report.`;
  }
  $("status").textContent = words;
  $("unlock").hidden = !state.locked;
  const verb = state.direction === "from" ? "from the marked token to" : "to the marked token from";
  $("meaning").textContent = {
    attention: `Color: attention weight ${verb} each token, in one head.`,
    attribution: facts.attribution.by_token
      ? `Color: positive (orange) or negative (purple) contribution to the ${facts.attribution.description}.`
      : `No contributions of tokens: ${facts.attribution.reason}.`,
    lens: `Color: probability of the actual next token after ${depthName(state.depth)}.`,
  }[state.view];
}

// ---- what comes next -----------------------------------------------------------------------------------------------

/** A line in a list of bars. `size`: length from -1 to 1; `whole`: percentage of the width for 1. */
function bar(name, size, number, { whole = 100, marked = false, click = null } = {}) {
  const filled = make("i", { className: size < 0 ? "below-zero" : "" });
  filled.style.width = `${Math.abs(size) * whole}%`;
  const title = make(click ? "button" : "span", { className: "name", textContent: name, title: name });
  if (click) Object.assign(title, { type: "button", onclick: click });
  const line = make("li", {}, title, make("span", { className: "track" }, filled));
  line.append(make("span", { className: "number", textContent: number }));
  line.classList.toggle("true", marked);
  return line;
}

function paintNext() {
  const shown = at(), { tokens, probabilities, k } = facts.likeliest, begin = shown * k;
  $("next-after").textContent = `after ${numbered(shown)}`;
  const lines = range(k).map((place) => {
    const token = tokens[begin + place], share = probabilities[begin + place];
    return bar(facts.names[token], share, percent(share), { marked: token === facts.tokens[shown + 1] });
  });
  $("next").replaceChildren(...lines);
  const share = nextProbability(facts.layers, shown);
  $("follows").textContent = shown === T - 1
    ? "The prompt ends here."
    : `Actual next token: ‘${facts.labels[shown + 1]}’ (${percent(share)}, rank ${facts.next_rank[shown]})`;
}

// ---- one head ------------------------------------------------------------------------------------------------------

function paintHead(map) {
  const { layer, head } = state, stored = isStored(layer, head), weights = matrix();
  $("head-name").textContent = headName(layer, head);
  $("layer").value = layer;
  $("layer-number").textContent = layer;
  const score = (name) => facts.scores[name][layer][head];
  $("head-scores").textContent =
    `${facts.summaries[layer][head]} · entropy ${score("entropy").toFixed(2)} nats · distance ${score("distance").toFixed(1)} · ` +
    `previous ${score("previous").toFixed(2)} · first ${score("first").toFixed(2)} · itself ${score("itself").toFixed(2)}`;
  $("not-stored").hidden = stored;
  if (!stored) {
    $("not-stored").textContent = "This report does not store all heads. Enlarged thumbnail of this head:";
    const labels = range(facts.side).map((place) => String(Math.floor((place * T) / facts.side)));
    map.show({ rows: labels, columns: labels, index: thumbnailIndex(layer, head), ramp: colours.heat, labelled: false });
  } else if (weights) {
    map.show({ rows: facts.labels, columns: facts.labels, index: (q, k) => weights.at(q, k), ramp: colours.heat });
  }
  map.canvas.ariaLabel = `${headName(layer, head)}: ${facts.summaries[layer][head]}. Rows are queries, columns are keys.`;
  legend($("map-legend"), colours.heat, "0", "1", "attention weight (square-root scale; the middle is ¼)");
}

/** Color index of thumbnail cells; cells above the diagonal are empty. */
function thumbnailIndex(layer, head) {
  const { side } = facts, begin = (layer * facts.heads + head) * side * side;
  return (row, column) => (column > row && !facts.bidirectional ? -1 : state.thumbnails[begin + row * side + column]);
}

function paintCross(map) {
  if (!matrix()) return map.cross(null, null);
  if (state.pair) return map.cross(...state.pair);
  state.direction === "from" ? map.cross(at(), null) : map.cross(null, at());
}

// ---- lines ---------------------------------------------------------------------------------------------------------

/** Choose the tokens on the left (queries) and right (keys). */
function chooseLines() {
  if (T <= MANY) return [range(T), range(T)];
  const begin = Math.max(0, Math.min(T - MANY, at() - MANY / 2)), own = range(MANY).map((place) => begin + place);
  const others = strongest(MANY).sort((a, b) => a - b);
  return state.direction === "from" ? [own, others] : [others, own];
}

function paintLines() {
  const canvas = $("lines"), weights = matrix();
  $("lines-note").textContent = !isStored(state.layer, state.head)
    ? "Not available: this report does not store this head."
    : !weights
    ? "Loading."
    : T <= MANY
      ? "Left: queries. Right: keys. Click a token to lock it."
      : `Left: queries. Right: keys. Shown of ${T} tokens: ${MANY} around the marked token, and the ${MANY} ` +
        `${state.direction === "from" ? "that it attends to most" : "that attend to it most"}.`;
  if (!weights) return sized(canvas, canvas.parentElement.clientWidth - 34, 1);
  if (state.from !== "lines" || !state.sides) state.sides = chooseLines().map(placed);
  const [left, right] = state.sides, shown = at();
  const width = canvas.parentElement.clientWidth - 34, height = Math.max(left.height, right.height);
  const context = sized(canvas, width, height), edge = Math.min(112, Math.round(width * 0.35));
  const active = (query, key) => (state.direction === "from" ? query === shown : key === shown);
  for (const last of [false, true]) {
    for (const [query, y] of left.tokens) {
      for (const [key, to] of right.tokens) {
        const weight = weights.weight(query, key);
        if (active(query, key) !== last || weight < (last ? 0.001 : 0.02)) continue;
        context.globalAlpha = last ? Math.min(1, 0.12 + weight) : 0.3 * weight;
        context.strokeStyle = last ? colours.mark : colours.quiet;
        context.lineWidth = last ? 1 + 2.5 * weight : 1;
        context.beginPath();
        context.moveTo(edge, y);
        context.bezierCurveTo(edge + 40, y, width - edge - 40, to, width - edge, to);
        context.stroke();
      }
    }
  }
  context.globalAlpha = 1;
  context.font = FONT;
  context.textBaseline = "middle";
  for (const [side, x, align] of [[left, edge - 4, "right"], [right, width - edge + 4, "left"]]) {
    const own = (side === left) === (state.direction === "from");
    context.textAlign = align;
    for (const [token, y] of side.tokens) {
      const byte = own ? -1 : between(token);
      if (byte > 8) {
        context.fillStyle = colours.heat.css[byte];
        context.fillRect(side === left ? 0 : width - edge, y - 8, edge, 16);
      }
      context.fillStyle = own && token === shown ? colours.mark : byte > 8 ? colours.heat.ink[byte] : colours.ink;
      context.fillText(facts.labels[token], x, y, edge - 6);
    }
    context.fillStyle = colours.quiet;
    for (const y of side.gaps) context.fillText("⋯", x, y);
  }
  const most = strongest(3).map((other) => `${numbered(other)} ${asWeight(between(other))}`).join(", ");
  canvas.ariaLabel = `lines between tokens; ${numbered(shown)}: ${most}`;
}

/** Place tokens in a column, [token, y] each, with gaps for omitted tokens. */
function placed(tokens) {
  const found = { tokens: [], gaps: [], height: 0 };
  let y = 10;
  tokens.forEach((token, place) => {
    if (place && token !== tokens[place - 1] + 1) {
      found.gaps.push(y - 2);
      y += 11;
    }
    found.tokens.push([token, y]);
    y += 17;
  });
  found.height = y;
  return found;
}

// ---- attribution and lens ------------------------------------------------------------------------------------------

function paintParts(select) {
  const { description, logit, by_token, reason, baseline_logit, embedding, mlps, biases, heads, completeness_error } = facts.attribution;
  const sum = (entries) => entries.reduce((total, [, value]) => total + value, 0);
  const show = (box, entries) => {
    const top = Math.max(...entries.map(([, value]) => Math.abs(value)), 1e-9);
    const line = ([name, value, click]) => bar(name, Math.max(-1, Math.min(1, value / top)), signed(value), { whole: 50, click });
    entries = entries.toSorted((a, b) => Math.abs(b[1]) - Math.abs(a[1]));
    const count = entries.length > LISTED ? LISTED - 1 : LISTED, others = entries.slice(count);
    const lines = entries.slice(0, count).map(line);
    if (others.length) lines.push(line([`${others.length} others`, sum(others)]));
    $(box).replaceChildren(...lines);
  };
  const tokens = (by_token ?? []).map((value, token) => [numbered(token), value]);
  const parts = [["embedding", embedding], ...mlps.map((value, layer) => [`MLP ${layer}`, value])];
  if (biases) parts.push(["biases", biases]);
  heads.forEach((row, layer) => row.forEach((value, head) => parts.push([`head ${layer}.${head}`, value, () => select(layer, head)])));
  show("by-token", tokens);
  show("by-part", parts);
  $("parts-what").textContent = `The ${description} is ${logit.toFixed(4)}.`;
  $("token-sum").textContent = by_token
    ? `Integrated gradients. Sum: ${sum(tokens).toFixed(4)}, plus ${baseline_logit.toFixed(4)} of the baseline, equals the logit.`
    : `Not available: ${reason}.`;
  $("part-sum").textContent = `Direct logit attribution. Sum: ${sum(parts).toFixed(4)}. Click a head to open it.`;
  $("parts-missed").hidden = !by_token || Math.abs(completeness_error) < 0.05 * Math.max(1, Math.abs(sum(tokens) - completeness_error));
  $("parts-missed").textContent =
    `Inaccurate values: the sum should be ${by_token && (sum(tokens) - completeness_error).toFixed(4)} (logit minus ` +
    `baseline), but the integration has an error of ${by_token && Math.abs(completeness_error).toFixed(4)}.`;
}

function paintLens(choose) {
  const shown = at(), { tokens, probabilities, k } = facts.lens, follows = shown < T - 1;
  $("depth").value = state.depth;
  $("depth").ariaValueText = depthName(state.depth);
  $("depth-name").textContent = depthName(state.depth);
  $("lens-after").textContent = `Predictions after ${numbered(shown)}, layer by layer. Click a row to color the tokens by it.`;
  const words = ["", "most likely", ...range(k - 1).map((place) => `${place + 2}.`)];
  if (follows) words.push(`actual: ‘${facts.labels[shown + 1]}’`);
  const head = make("tr", {}, ...words.map((text) => make("th", { scope: "col", textContent: text })));
  const cell = (text, share) => {
    const index = Math.round(255 * Math.sqrt(share)), number = make("span", { className: "share", textContent: percent(share) });
    const found = make("td", {}, text, number);
    Object.assign(found.style, { background: colours.heat.css[index], color: colours.heat.ink[index] });
    return found;
  };
  const rows = range(facts.layers + 1).map((depth) => {
    const begin = (depth * T + shown) * k;
    const row = make("tr", { className: depth === state.depth ? "at" : "", onclick: () => choose(depth) });
    row.append(make("th", { scope: "row", textContent: depthName(depth) }));
    for (const place of range(k)) row.append(cell(facts.names[tokens[begin + place]], probabilities[begin + place]));
    if (follows) row.append(cell("", nextProbability(depth, shown)));
    return row;
  });
  $("lens").replaceChildren(make("thead", {}, head), make("tbody", {}, ...rows));
}
