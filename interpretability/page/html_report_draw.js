// Drawing primitives: elements, colors, packed bytes, heatmaps with axes, tooltips. Independent of models.

/** Inflate the bytes of a script element. */
async function unpack(id) {
  const text = atob($(id).textContent), bytes = new Uint8Array(text.length);
  for (let at = 0; at < text.length; at++) bytes[at] = text.charCodeAt(at);
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"))).arrayBuffer();
}

/** Resize a canvas to `width` x `height` CSS pixels, sharp on any screen. Returns its context. */
function sized(canvas, width, height) {
  const dense = window.devicePixelRatio || 1;
  canvas.width = Math.round(width * dense);
  canvas.height = Math.round(height * dense);
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d");
  context.scale(dense, dense);
  return context;
}

// ---- colors --------------------------------------------------------------------------------------------------------

const colours = { version: 0 };

/** A ramp of `count` colors through stops: packed for image data, as CSS, and a readable text color for each. */
function ramp(stops, count) {
  const found = { packed: new Uint32Array(count), css: [], ink: [] };
  for (let at = 0; at < count; at++) {
    const place = (at / (count - 1)) * (stops.length - 1), low = Math.min(Math.floor(place), stops.length - 2);
    const rgb = stops[low].map((from, part) => Math.round(from + (place - low) * (stops[low + 1][part] - from)));
    const linear = rgb.map((x) => ((x /= 255) <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4));
    const luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
    found.packed[at] = (255 << 24) | (rgb[2] << 16) | (rgb[1] << 8) | rgb[0];
    found.css.push(`rgb(${rgb})`);
    found.ink.push(luminance > 0.179 ? "#000" : "#fff"); // the better of the two has a contrast of at least 4.5
  }
  return found;
}

/** Read the colors of the theme from the style sheet. */
function readColours() {
  const probe = make("i", { hidden: true });
  document.body.append(probe);
  const rgb = (name) => {
    probe.style.color = `var(--${name})`;
    return getComputedStyle(probe).color.match(/\d+/g).slice(0, 3).map(Number);
  };
  colours.heat = ramp([0, 1, 2, 3, 4].map((step) => rgb(`heat-${step}`)), 256); // by byte: 255 times the root of a weight
  colours.signed = ramp([rgb("minus"), rgb("zero"), rgb("plus")], 511); // 255 is zero
  for (const name of ["ink", "quiet", "edge", "mark", "accent", "card"]) colours[name] = `rgb(${rgb(name)})`;
  probe.remove();
  colours.version++;
}

/** Index of a signed value in the signed colors. */
const signedIndex = (value, top) => 255 + Math.round(255 * Math.max(-1, Math.min(1, value / top)));

// ---- numbers -------------------------------------------------------------------------------------------------------

const percent = (share) => (share < 0.00005 ? "< 0.01%" : `${(100 * share).toFixed(share < 0.0995 ? 2 : 1)}%`);
const signed = (value) => `${value < 0 ? "−" : "+"}${Math.abs(value).toFixed(3)}`;

// ---- the tip -------------------------------------------------------------------------------------------------------

/** Show a tooltip near a point, inside the window; hide it without text. */
function tip(text, x = 0, y = 0) {
  const box = $("tip");
  box.hidden = !text;
  if (!text) return;
  box.textContent = text;
  const left = x + 14 + box.offsetWidth > innerWidth ? Math.max(4, x - box.offsetWidth - 10) : x + 14;
  const above = y + 18 + box.offsetHeight > innerHeight ? y - box.offsetHeight - 10 : y + 18;
  box.style.transform = `translate(${left}px, ${Math.max(4, above)}px)`;
}

/** Show a tooltip below a focused element. */
function tipBelow(element, text) {
  const place = element.getBoundingClientRect();
  tip(text, place.left - 10, place.bottom - 10);
}

// ---- heatmaps ------------------------------------------------------------------------------------------------------

const FONT = '11px ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace';

/** A matrix as colors, with labels if there is room, and a movable cross. */
class Heatmap {
  /** Calls `pointed(row, column, event)` over cells, `pointed()` when the pointer leaves, and `clicked(row, column)`. */
  constructor(box, pointed, clicked) {
    Object.assign(this, { box, pointed, clicked });
    this.canvas = make("canvas");
    this.canvas.setAttribute("role", "img");
    this.bands = ["row", "column"].map(() => make("div", { className: "cross", hidden: true }));
    box.append(this.canvas, ...this.bands);
    this.canvas.addEventListener("pointermove", (event) => {
      const cell = this.cellAt(event);
      cell ? pointed(...cell, event) : pointed();
    });
    this.canvas.addEventListener("pointerleave", () => pointed());
    this.canvas.addEventListener("click", (event) => {
      const cell = this.cellAt(event);
      if (cell) clicked(...cell);
    });
  }

  /** Draw. `index(row, column)`: index into `ramp`, or -1 for an empty cell; `rows`, `columns`: labels. */
  show({ rows, columns, index, ramp, labelled = true }) {
    const [R, C] = (this.shape = [rows.length, columns.length]), dense = window.devicePixelRatio || 1;
    const room = Math.min(640, this.box.clientWidth), largest = 30; // pixels: total, per cell
    const measure = sized(this.canvas, 10, 10);
    measure.font = FONT;
    const longest = (labels, most) =>
      Math.min(most, Math.ceil(Math.max(...labels.map((text) => measure.measureText(text).width)))) + 8;
    let left = R <= 80 && labelled ? longest(rows, 130) : 34;
    const fit = (cell) => (cell * dense >= 1 ? Math.floor(cell * dense) / dense : cell); // whole screen pixels
    this.cw = this.ch = Math.min(largest, fit(Math.max(60, room - left) / C));
    const named = { rows: labelled && R <= 80 && this.ch >= 11, columns: labelled && this.cw >= 11 };
    if (!named.rows) left = 34;
    const top = named.columns ? longest(columns, 110) : 18;
    Object.assign(this, { left, top, width: this.cw * C, height: this.ch * R });
    const context = sized(this.canvas, Math.ceil(left + this.width + 1), Math.ceil(top + this.height + 1));
    context.imageSmoothingEnabled = false;
    context.drawImage(this.bitmap(index, ramp, dense), left, top, this.width, this.height);
    context.font = FONT;
    context.fillStyle = colours.quiet;
    context.textBaseline = "middle";
    this.axis(context, rows, named.rows, (at, text) => {
      context.textAlign = "right";
      context.fillText(text, left - 5, top + (at + 0.5) * this.ch, left - 6);
    }, this.ch);
    this.axis(context, columns, named.columns, (at, text) => {
      const half = named.columns ? 0 : context.measureText(text).width / 2; // keep numbers inside the canvas
      context.save();
      context.translate(Math.min(left + (at + 0.5) * this.cw, left + this.width - half), top - 5);
      if (named.columns) context.rotate(-Math.PI / 2);
      context.textAlign = named.columns ? "left" : "center";
      context.fillText(text, 0, named.columns ? 0 : -4, named.columns ? top - 8 : 60);
      context.restore();
    }, this.cw);
  }

  /** Labels if there is room, else some numbers. */
  axis(context, labels, named, write, cell) {
    if (named) return labels.forEach((text, at) => write(at, text));
    const interval = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000].find((step) => step * cell >= 36);
    for (let at = 0; at < labels.length; at += interval ?? labels.length) write(at, String(at));
  }

  /** One pixel per cell; if the screen has fewer, each shows its largest absolute value. */
  bitmap(index, ramp, dense) {
    const [R, C] = this.shape;
    const [height, width] = [Math.min(R, Math.round(this.height * dense)), Math.min(C, Math.round(this.width * dense))];
    const best = new Int16Array(height * width).fill(-1), zero = ramp === colours.signed ? 255 : -1;
    for (let row = 0; row < R; row++) {
      const begin = Math.floor((row * height) / R) * width;
      for (let column = 0; column < C; column++) {
        const place = begin + (width === C ? column : Math.floor((column * width) / C)), value = index(row, column);
        if (best[place] < 0 || Math.abs(value - zero) > Math.abs(best[place] - zero)) best[place] = value;
      }
    }
    const canvas = make("canvas", { width, height }), image = new ImageData(width, height);
    const pixels = new Uint32Array(image.data.buffer);
    for (let at = 0; at < best.length; at++) if (best[at] >= 0) pixels[at] = ramp.packed[best[at]];
    canvas.getContext("2d").putImageData(image, 0, 0);
    return canvas;
  }

  /** [row, column] at the pointer, or null. */
  cellAt(event) {
    const place = this.canvas.getBoundingClientRect();
    const column = Math.floor((event.clientX - place.left - this.left) / this.cw);
    const row = Math.floor((event.clientY - place.top - this.top) / this.ch);
    return row >= 0 && column >= 0 && row < this.shape[0] && column < this.shape[1] ? [row, column] : null;
  }

  /** Frame a row, a column, or both; null for none. */
  cross(row, column) {
    const [across, down] = this.bands;
    across.hidden = row === null;
    down.hidden = column === null;
    const place = (band, x, y, width, height) =>
      Object.assign(band.style, { left: `${x}px`, top: `${y}px`, width: `${width}px`, height: `${height}px` });
    place(across, this.left - 1, this.top + row * this.ch - 1, this.width + 2, Math.max(this.ch, 1) + 2);
    place(down, this.left + column * this.cw - 1, this.top - 1, Math.max(this.cw, 1) + 2, this.height + 2);
  }
}

/** Draw a strip of a ramp's colors between two labels, with a note. */
function legend(box, ramp, from, to, note) {
  const canvas = make("canvas", { width: ramp.css.length, height: 1 }), image = new ImageData(ramp.css.length, 1);
  new Uint32Array(image.data.buffer).set(ramp.packed);
  canvas.getContext("2d").putImageData(image, 0, 0);
  canvas.setAttribute("aria-hidden", "true");
  box.replaceChildren(from, canvas, to, make("span", { textContent: note }));
}
