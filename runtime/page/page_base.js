// What the interactive pages share: elements, storage, the theme.
"use strict";

const $ = (id) => document.getElementById(id);

/** Create an element with properties and children. Strings are text, never markup. */
function make(tag, properties = {}, ...inside) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...inside);
  return element;
}

/** Access one of the browser's storages by name; null if the browser denies it. */
function useStorage(name, change) {
  try {
    return change(window[name]);
  } catch (error) {
    if (error instanceof DOMException) return null;
    throw error;
  }
}

const THEMES = ["auto", "light", "dark"];

function setTheme(name) {
  document.documentElement.dataset.theme = name;
  $("theme").textContent = `Theme: ${name}`;
}

/** Let the theme button change the theme, which the browser remembers. Calls onChange() whenever colors change. */
function startTheme(onChange = () => {}) {
  const show = (name) => {
    setTheme(name);
    onChange();
  };
  const known = useStorage("localStorage", (storage) => storage.getItem("thinker-theme"));
  show(THEMES.includes(known) ? known : "auto");
  $("theme").addEventListener("click", () => {
    const next = THEMES[(THEMES.indexOf(document.documentElement.dataset.theme) + 1) % THEMES.length];
    useStorage("localStorage", (storage) => storage.setItem("thinker-theme", next));
    show(next);
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", onChange);
}
