// The settings of sampling: one list describes their fields, what is sent, and what a link holds.

const MAX_TOKENS = 200; // unless the server generates fewer
const SETTINGS = [
  { name: "temperature", group: "basic", label: "Temperature", value: 0.8, min: 0, max: 2, step: 0.01, slider: true,
    help: "Higher is more varied. 0 always takes the likeliest token." },
  { name: "max_tokens", group: "basic", label: "Max tokens", value: MAX_TOKENS, min: 1, max: 1e6, step: 1,
    help: "How many tokens to add at most." },
  { name: "top_p", group: "basic", label: "Top-p", value: 1, min: 0.01, max: 1, step: 0.01, slider: true,
    help: "Samples from the likeliest tokens that together have this probability." },
  { name: "seed", group: "basic", label: "Seed", value: "", min: 0, max: Number.MAX_SAFE_INTEGER, step: 1,
    placeholder: "random", help: "The same seed and settings give the same text." },
  { name: "logprobs", group: "basic", label: "Alternatives", value: 5, min: 0, max: 20, step: 1,
    help: "How many of the likeliest tokens to list, with their probabilities before temperature and filters." },
  { name: "top_k", group: "more", label: "Top-k", value: "", min: 1, step: 1, placeholder: "all",
    help: "Samples from the k likeliest tokens." },
  { name: "min_p", group: "more", label: "Min-p", value: 0, min: 0, max: 1, step: 0.01, slider: true,
    help: "Drops tokens below this share of the likeliest token's probability." },
  { name: "repetition_penalty", group: "more", label: "Repetition penalty", value: 1, min: 0.01, step: 0.01,
    help: "Above 1, tokens of the text so far become less likely." },
  { name: "presence_penalty", group: "more", label: "Presence penalty", value: 0, min: -2, max: 2, step: 0.01,
    help: "Subtracted once from the logit of each generated token." },
  { name: "frequency_penalty", group: "more", label: "Frequency penalty", value: 0, min: -2, max: 2, step: 0.01,
    help: "Subtracted each time that a token is generated." },
  { name: "stop", group: "more", label: "Stop strings", value: "", lines: 2,
    help: "The text ends at any of them. One per line; \\n stands for a line break." },
  { name: "json_schema", group: "advanced", label: "JSON schema", value: "", lines: 5,
    help: "The text is JSON that fits this schema." },
];

const settings = {
  fields: new Map(),

  start() {
    for (const setting of SETTINGS) $(setting.group).append(this.field(setting));
    $("settings").addEventListener("input", () => this.check());
    $("settings").addEventListener("submit", (event) => event.preventDefault());
    $("reset").addEventListener("click", () => this.restore(new URLSearchParams()));
  },

  field({ name, label, help, value, slider, lines, min, max, step, placeholder = "" }) {
    const id = `setting-${name}`, range = { min: min ?? "", max: max ?? "", step };
    const kind = lines ? { rows: lines, spellcheck: false } : { type: "number", ...range, required: value !== "" };
    const input = make(lines ? "textarea" : "input", { id, value, placeholder, ...kind });
    input.setAttribute("aria-describedby", `${id}-help`);
    this.fields.set(name, input);
    const box = make("div", { className: lines ? "setting long" : "setting" });
    box.append(make("label", { htmlFor: id, textContent: label }), input);
    if (slider) box.append(this.slider(input, range, label));
    box.append(make("p", { className: "quiet", id: `${id}-help`, textContent: help }));
    return box;
  },

  /** A slider that moves with a number, for the pointer: the keyboard has the number. */
  slider(input, range, label) {
    const slider = make("input", { type: "range", ...range, value: input.value, tabIndex: -1 });
    slider.ariaLabel = `${label}, slider`;
    slider.addEventListener("input", () => (input.value = slider.value));
    input.addEventListener("input", () => (slider.value = input.value));
    return slider;
  },

  /** The value of a setting: a number, a text, or null for an empty number. */
  value(name) {
    const input = this.fields.get(name);
    if (input.type !== "number") return input.value;
    return input.value === "" ? null : input.valueAsNumber;
  },

  set(name, value) {
    this.fields.get(name).value = value;
    this.fields.get(name).dispatchEvent(new Event("input", { bubbles: true }));
  },

  /** Make the server's limit of generated tokens (null: none) that of the field, and lower its default. */
  limitTokens(most) {
    const setting = SETTINGS.find(({ name }) => name === "max_tokens"), field = this.fields.get("max_tokens");
    const isDefault = field.value === String(setting.value);
    setting.value = Math.min(MAX_TOKENS, most ?? MAX_TOKENS);
    field.max = most ?? setting.max;
    if (isDefault) this.set("max_tokens", setting.value);
    this.check();
  },

  check() {
    const schema = this.fields.get("json_schema");
    schema.setCustomValidity("");
    try {
      if (schema.value.trim()) JSON.parse(schema.value);
    } catch (error) {
      if (!(error instanceof SyntaxError)) throw error;
      schema.setCustomValidity(`This is not JSON: ${error.message}`);
    }
    for (const input of this.fields.values()) input.ariaInvalid = String(!input.validity.valid);
  },

  /** Whether all settings are valid; shows the first that is not. */
  areValid() {
    this.check();
    for (const group of document.querySelectorAll("#settings details:has(:invalid)")) group.open = true;
    return $("settings").reportValidity();
  },

  /** The part of a request's body that all requests share. */
  body() {
    const penalties = ["repetition_penalty", "presence_penalty", "frequency_penalty"];
    const names = ["temperature", "top_p", "min_p", "top_k", ...penalties, "seed"];
    const body = Object.fromEntries(names.map((name) => [name, this.value(name)]));
    const stop = this.value("stop").split("\n").filter(Boolean).map((line) => line.replaceAll("\\n", "\n"));
    const schema = this.value("json_schema").trim();
    if (stop.length) body.stop = stop;
    const format = { type: "json_schema", json_schema: { name: "playground", schema: schema && JSON.parse(schema) } };
    if (schema) body.response_format = format;
    return { ...body, stream: true, stream_options: { include_usage: true } };
  },

  /** Add the settings that differ from the defaults to the parameters of a link. */
  save(parameters) {
    for (const { name, value } of SETTINGS) {
      const text = this.fields.get(name).value;
      if (text !== String(value)) parameters.set(name, text);
    }
  },

  /** Set all settings: those in the parameters of a link, and the others to their defaults. */
  restore(parameters) {
    for (const { name, value, group } of SETTINGS) {
      this.set(name, parameters.get(name) ?? value);
      if (parameters.has(name) && group !== "basic") $(group).open = true;
    }
  },
};
