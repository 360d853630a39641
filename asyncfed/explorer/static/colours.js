// Colours: of statuses, of runs, and of quantities. All of them can be told apart by the colour-blind.

export const STATUSES = ["delivered", "lost", "link_down", "in_flight", "late", "carried"];
export const STATUS_WORDS = { delivered: "delivered", lost: "lost", link_down: "link down", in_flight: "in flight",
  late: "late", carried: "carried later" };
export const STATUS_COLOURS = { delivered: "#2b7bba", lost: "#d1383f", link_down: "#8d949c", in_flight: "#8e5bbf",
  late: "#e0912f", carried: "#2f9e62" };
export const RUN_COLOURS = ["#2b7bba", "#d9742b", "#2f9e62", "#8e5bbf", "#c23b45", "#2f9aa8", "#a67c3d", "#6b7480"];
export const PHASE_COLOURS = ["#a9b7c4", "#e0ad6b", "#8fbf8a", "#b99ad1", "#d98f94", "#86c5cc", "#c9b184", "#7aa6d1"];

const VIRIDIS = [[68, 1, 84], [71, 44, 122], [59, 81, 139], [44, 113, 142], [33, 144, 141], [39, 173, 129],
  [92, 200, 99], [170, 220, 50], [253, 231, 37]];
const DIVERGING = [[33, 102, 172], [103, 169, 207], [209, 229, 240], [247, 247, 247], [253, 219, 199],
  [239, 138, 98], [178, 24, 43]];

function along(stops, share) {
  const place = Math.min(Math.max(share, 0), 1) * (stops.length - 1);
  const low = Math.min(Math.floor(place), stops.length - 2);
  return stops[low].map((value, channel) => Math.round(value + (stops[low + 1][channel] - value) * (place - low)));
}

/** [r, g, b] of a share in [0, 1]; on light ground the brightest yellow would not be seen. */
export function sequential(share) {
  return along(VIRIDIS, isDark() ? 0.12 + 0.88 * share : 0.93 * share);
}

/** [r, g, b] of a difference in [-1, 1]. */
export function diverging(value) {
  return along(DIVERGING, (value + 1) / 2);
}

export function css([red, green, blue], alpha = 1) {
  return alpha === 1 ? `rgb(${red},${green},${blue})` : `rgba(${red},${green},${blue},${alpha})`;
}

export function isDark() {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

/** What the style sheet calls a colour. */
export function ink(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

/** Place of a value between the least and the most of some, as a share; one value alone stands in the middle. */
export function scaled(values, { low = Infinity, high = -Infinity } = {}) {
  for (const value of values) {
    if (value < low) low = value;
    if (value > high) high = value;
  }
  if (!Number.isFinite(low)) [low, high] = [0, 1];
  return { low, high, of: (value) => (high > low ? (value - low) / (high - low) : 0.5) };
}
