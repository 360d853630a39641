// Numbers for people, and elements made of text only: what a run says never becomes markup.

export function count(value) {
  return value == null || Number.isNaN(value) ? "–" : Math.round(value).toLocaleString("en-US");
}

export function number(value, digits = 4) {
  if (value == null || Number.isNaN(value)) return "–";
  if (!Number.isFinite(value)) return value > 0 ? "∞" : "−∞";
  if (Number.isInteger(value) && Math.abs(value) < 1e7) return value.toLocaleString("en-US");
  const size = Math.abs(value);
  if (size >= 1e7 || (size < 1e-4 && size > 0)) return value.toExponential(Math.max(0, digits - 2));
  return String(Number(value.toPrecision(digits)));
}

export function bytes(value) {
  if (value == null || Number.isNaN(value)) return "–";
  for (const [size, unit] of [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"]]) {
    if (Math.abs(value) >= size) return `${number(value / size, 3)} ${unit}`;
  }
  return `${number(value, 3)} B`;
}

export function percent(value) {
  return value == null || Number.isNaN(value) ? "–" : `${number(100 * value, 3)}%`;
}

/** An element with attributes (functions listen), and children: elements, or text. */
export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value == null || (value === false && !name.startsWith("aria-"))) continue;
    if (typeof value === "function") element.addEventListener(name, value);
    else element.setAttribute(name, value === true && !name.startsWith("aria-") ? "" : String(value));
  }
  element.append(...children.filter((child) => child != null));
  return element;
}

const SVG = "http://www.w3.org/2000/svg";

export function shape(tag, attributes = {}, ...children) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, String(value));
  element.append(...children);
  return element;
}

/** A table of text; `right` are the columns of numbers. */
export function table(heads, rows, { right = [], pick = null, caption = null } = {}) {
  const classes = (place) => (right.includes(place) ? { class: "number" } : {});
  const body = rows.map((cells, row) => {
    const line = make("tr", pick ? { tabindex: 0, class: "pick", click: () => pick(row),
      keydown: (event) => { if (event.key === "Enter") pick(row); } } : {});
    line.append(...cells.map((cell, place) => make("td", classes(place), cell)));
    return line;
  });
  return make("table", {}, caption ? make("caption", {}, caption) : null,
    make("thead", {}, make("tr", {}, ...heads.map((head, place) => make("th", { scope: "col", ...classes(place) }, head)))),
    make("tbody", {}, ...body));
}

/** A choice with a label. */
export function chooser(label, options, value, change) {
  const select = make("select", { change: () => change(select.value) },
    ...options.map(([key, text]) => make("option", { value: key, selected: key === value }, text)));
  return make("label", { class: "choice" }, make("span", {}, label), select);
}

/** Round places for about so many ticks from `low` to `high`. */
export function ticks(low, high, about = 6) {
  if (!(high > low)) return [low];
  const rough = (high - low) / about;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((times) => times * power).find((size) => size >= rough * 0.999);
  const found = [];
  for (let place = Math.ceil(low / step - 1e-9); place * step <= high + step * 1e-9; place += 1) found.push(place * step || 0);
  return found;
}

/** A tick as text, to the digits that its distance from the next one needs. */
export function tickText(value, step) {
  if (Math.abs(value) >= 1e6 || (step < 1e-4 && value !== 0)) return number(value, 4);
  return value.toLocaleString("en-US", { maximumFractionDigits: Math.max(0, Math.ceil(-Math.log10(step || 1) - 1e-9)) });
}
