// What can be shown of an edge, as the trace's own tables call it.
import { bytes, count, make, number, percent } from "./words.js";
import { diverging, scaled } from "./colours.js";
import { ramp } from "./panel.js";

export const QUANTITIES = {
  delivery_rate: { words: "delivery rate", text: percent, share: true },
  up_rate: { words: "link up", text: percent, share: true },
  bytes: { words: "bytes sent", text: bytes },
  delay_mean: { words: "mean delay", text: number },
  delay_max: { words: "longest delay", text: number },
  staleness_mean: { words: "mean staleness", text: number },
  staleness_max: { words: "largest staleness", text: number },
  attempts: { words: "attempts", text: count },
  sent: { words: "sent", text: count },
  delivered: { words: "delivered", text: count },
  lost: { words: "lost", text: count },
  link_down: { words: "link down", text: count },
  late: { words: "late", text: count },
  carried: { words: "carried later", text: count },
  in_flight: { words: "in flight", text: count },
};

/** Those that a table of edges has something of, as options. */
export function quantitiesOf(tables) {
  const always = new Set(["delivery_rate", "up_rate", "bytes", "attempts", "sent", "delivered"]);
  return Object.entries(QUANTITIES)
    .filter(([name]) => tables.some((edges) => edges[name] && (always.has(name) || edges[name].some((value) => value > 0))))
    .map(([name, { words }]) => [name, words]);
}

/** How a quantity becomes a colour: rates from 0 to 1, the others over what there is. */
export function scaleOf(quantity, arrays) {
  const limits = QUANTITIES[quantity].share ? { low: 0, high: 1 } : {};
  let scale = { low: Infinity, high: -Infinity };
  for (const values of arrays) scale = scaled(values, scale);
  return scaled([], { low: limits.low ?? Math.min(scale.low, 0), high: limits.high ?? scale.high });
}

export function differenceScale(arrays) {
  const most = Math.max(1e-12, ...arrays.flatMap((values) => [...values].filter(Number.isFinite).map(Math.abs)));
  return { low: -most, high: most, of: (value) => value / most };
}

/** What the colours mean, and where there is one, what the widths do. */
export function legend(quantity, scale, { difference = false, extra = null } = {}) {
  const { words, text } = QUANTITIES[quantity];
  const bar = difference ? ramp(diverging, -1) : ramp();
  return make("div", { class: "legend" }, make("span", { class: "legend-name" }, difference ? `difference of ${words}` : words),
    make("span", { class: "legend-end" }, text(scale.low)), bar, make("span", { class: "legend-end" }, text(scale.high)),
    extra ? make("span", { class: "legend-extra" }, extra) : null);
}

/** Place of every edge in a table by "sender receiver". */
export function edgePlaces(edges) {
  if (!edges.places) {
    edges.places = new Map();
    for (let place = 0; place < edges.sender.length; place += 1) {
      edges.places.set(edges.sender[place] * 4194304 + edges.receiver[place], place);
    }
  }
  return edges.places;
}

export function edgePlace(edges, sender, receiver) {
  return edgePlaces(edges).get(sender * 4194304 + receiver);
}
