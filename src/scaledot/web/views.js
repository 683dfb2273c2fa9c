/** Views beside those of a text, offered by name before app.js starts. */

const offered = new Map();

/** @param {string} name @param {object} view  what app.js finds under the name */
export function offerView(name, view) {
  offered.set(name, view);
}

/** @param {string} name */
export function offeredView(name) {
  return offered.get(name);
}
