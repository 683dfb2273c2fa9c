// @ts-check
/**
 * Pictures as data: a list of marks that is painted on a canvas, shown as SVG, or saved as either.
 *
 * Every figure of the page is made once, as marks; the screen, the SVG file and the PNG file are
 * three readings of the same list, so that what is saved is what was seen. All lengths are CSS
 * pixels; colours are CSS colours. Nothing here computes a value of the model.
 */

/** @typedef {{size?: number, weight?: number, fill?: string, anchor?: "start"|"middle"|"end",
 *   family?: string, italic?: boolean, turn?: boolean, halo?: string}} TextStyle */
/** @typedef {{t: string, italic?: boolean, weight?: number, family?: string, fill?: string,
 *   shift?: "sub"|"sup"}} Run */
/** @typedef {string | Array<string | Run>} Words */
/** @typedef {[number, number]} Point */
/** @typedef {ReturnType<typeof newPicture>} Picture */
/** @typedef {Record<string, string>} Palette */

export const SANS_FAMILY =
  '-apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, "Hiragino Sans", ' +
  '"Hiragino Kaku Gothic ProN", "Yu Gothic UI", Meiryo, "Noto Sans CJK JP", "Noto Sans JP", ' +
  "sans-serif";
export const SERIF_FAMILY =
  '"STIX Two Text", Cambria, "Times New Roman", Times, "Hiragino Mincho ProN", "Yu Mincho", ' +
  '"Noto Serif CJK JP", serif';

const SVG_SPACE = "http://www.w3.org/2000/svg";
/** Above this a map is an image in SVG and a scaled bitmap on a canvas, not one mark a cell. */
const MOST_CELLS = 6000;
const PALETTE_NAMES = [
  "bg", "raise", "ink", "ink2", "ink3", "rule", "rule2", "row", "rowbg", "neg", "pos", "seq",
  "hatch", "warn", "errbg",
];
let patternCount = 0;

/** An empty picture; its methods add marks in painting order and give the picture back. */
export function newPicture(/** @type {number} */ width, /** @type {number} */ height) {
  /** @type {any[]} */
  const items = [];
  const picture = {
    width,
    height,
    items,
    /** @param {number} x @param {number} y @param {number} w @param {number} h
     *  @param {string|null} fill @param {string|null} [stroke] @param {number} [line] */
    rect(x, y, w, h, fill, stroke = null, line = 1) {
      items.push({ kind: "rect", x, y, w, h, fill, stroke, line });
      return picture;
    },
    /** @param {Point[]} points @param {string} stroke @param {number} [line]
     *  @param {number[]} [dash] @param {string|null} [fill] */
    path(points, stroke, line = 1, dash = [], fill = null) {
      items.push({ kind: "path", points, stroke, line, dash, fill });
      return picture;
    },
    /** @param {number} x @param {number} y @param {number} r @param {string|null} fill
     *  @param {string|null} [stroke] @param {number} [line] */
    dot(x, y, r, fill, stroke = null, line = 1.5) {
      items.push({ kind: "dot", x, y, r, fill, stroke, line });
      return picture;
    },
    /** @param {number} x @param {number} y baseline @param {Words} words
     *  @param {TextStyle} [style] */
    text(x, y, words, style = {}) {
      items.push({ kind: "text", x, y, words, style });
      return picture;
    },
    /** Diagonals of 1 px every 4 px inside the rectangles [x, y, w, h].
     *  @param {number[][]} rects @param {string} stroke */
    hatch(rects, stroke) {
      if (rects.length) items.push({ kind: "hatch", rects, stroke });
      return picture;
    },
    /** A matrix of coloured cells; a null colour leaves its cell out.
     *  @param {number} x @param {number} y @param {number} w @param {number} h of one cell
     *  @param {number} rows @param {number} columns
     *  @param {(i: number, j: number) => string|null} colour */
    cells(x, y, w, h, rows, columns, colour) {
      items.push({ kind: "cells", x, y, w, h, rows, columns, colour });
      return picture;
    },
    /** Another picture, moved by (x, y). @param {any} other @param {number} x @param {number} y */
    put(other, x, y) {
      items.push({ kind: "put", other, x, y });
      return picture;
    },
  };
  return picture;
}

/** The colours in force at an element, by their names in the style sheet. */
export function paletteOf(/** @type {Element} */ element) {
  const style = getComputedStyle(element);
  /** @type {Palette} */
  const palette = {};
  for (const name of PALETTE_NAMES) palette[name] = style.getPropertyValue(`--${name}`).trim();
  return palette;
}

/** The smallest type of the pictures: an axis' on a page of this width. */
export function axisSize() {
  return innerWidth >= 1600 ? 13 : 11;
}

/** @param {TextStyle & Run} style */
function fontOf(style) {
  const size = (style.size ?? 11) * (style.shift ? 0.7 : 1);
  const family = style.family ?? SANS_FAMILY;
  return `${style.italic ? "italic " : ""}${style.weight ?? 400} ${size}px ${family}`;
}

/** @param {Words} words @returns {Run[]} */
function runsOf(words) {
  const list = typeof words === "string" ? [words] : words;
  return list.map((run) => (typeof run === "string" ? { t: run } : run));
}

/** @type {CanvasRenderingContext2D | null} */
let measuringContext = null;

/** Width in pixels of words set in a style. */
export function wordsWidth(/** @type {Words} */ words, /** @type {TextStyle} */ style = {}) {
  measuringContext ??= document.createElement("canvas").getContext("2d");
  const context = /** @type {CanvasRenderingContext2D} */ (measuringContext);
  let width = 0;
  for (const run of runsOf(words)) {
    context.font = fontOf({ ...style, ...run });
    width += context.measureText(run.t).width;
  }
  return width;
}

/** The text cut with an ellipsis so that it is at most `most` pixels wide. */
export function fitWords(
  /** @type {string} */ text, /** @type {number} */ most, /** @type {TextStyle} */ style = {},
) {
  if (wordsWidth(text, style) <= most) return text;
  const characters = [...text];
  while (characters.length > 1 && wordsWidth(`${characters.join("")}…`, style) > most) {
    characters.pop();
  }
  return `${characters.join("")}…`;
}

/** Paint a picture on a canvas at the screen's own resolution. */
export function paintPicture(
  /** @type {HTMLCanvasElement} */ canvas, /** @type {Picture} */ picture,
  /** @type {number} */ density = globalThis.devicePixelRatio || 1,
) {
  canvas.width = Math.max(1, Math.round(picture.width * density));
  canvas.height = Math.max(1, Math.round(picture.height * density));
  canvas.style.width = `${picture.width}px`;
  canvas.style.height = `${picture.height}px`;
  const context = /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"));
  context.setTransform(density, 0, 0, density, 0, 0);
  context.clearRect(0, 0, picture.width, picture.height);
  for (const item of picture.items) paintItem(context, item);
}

/** @param {CanvasRenderingContext2D} context @param {any} item */
function paintItem(context, item) {
  context.save();
  PAINTERS[/** @type {keyof typeof PAINTERS} */ (item.kind)](context, item);
  context.restore();
}

const PAINTERS = {
  /** @param {CanvasRenderingContext2D} context @param {any} item */
  rect(context, item) {
    if (item.fill) {
      context.fillStyle = item.fill;
      context.fillRect(item.x, item.y, item.w, item.h);
    }
    if (item.stroke) {
      context.strokeStyle = item.stroke;
      context.lineWidth = item.line;
      context.strokeRect(item.x, item.y, item.w, item.h);
    }
  },
  /** @param {CanvasRenderingContext2D} context @param {any} item */
  path(context, item) {
    context.beginPath();
    item.points.forEach((/** @type {Point} */ [x, y], /** @type {number} */ index) => {
      if (index) context.lineTo(x, y);
      else context.moveTo(x, y);
    });
    if (item.fill) {
      context.fillStyle = item.fill;
      context.fill();
    }
    context.setLineDash(item.dash);
    context.strokeStyle = item.stroke;
    context.lineWidth = item.line;
    if (item.line) context.stroke();
  },
  /** @param {CanvasRenderingContext2D} context @param {any} item */
  dot(context, item) {
    context.beginPath();
    context.arc(item.x, item.y, item.r, 0, 2 * Math.PI);
    if (item.fill) {
      context.fillStyle = item.fill;
      context.fill();
    }
    if (item.stroke) {
      context.strokeStyle = item.stroke;
      context.lineWidth = item.line;
      context.stroke();
    }
  },
  /** @param {CanvasRenderingContext2D} context @param {any} item */
  text(context, item) {
    const { style } = item;
    context.translate(item.x, item.y);
    if (style.turn) context.rotate(-Math.PI / 2);
    const part = { start: 0, middle: 0.5, end: 1 }[
      /** @type {"start"|"middle"|"end"} */ (style.anchor ?? "start")
    ];
    let x = -wordsWidth(item.words, style) * part;
    for (const run of runsOf(item.words)) {
      const whole = { ...style, ...run };
      context.font = fontOf(whole);
      const y = { sub: 0.25, sup: -0.4, none: 0 }[run.shift ?? "none"] * (style.size ?? 11);
      if (style.halo) {
        context.strokeStyle = style.halo;
        context.lineWidth = 3;
        context.lineJoin = "round";
        context.strokeText(run.t, x, y);
      }
      context.fillStyle = whole.fill ?? "#000";
      context.fillText(run.t, x, y);
      x += context.measureText(run.t).width;
    }
  },
  /** @param {CanvasRenderingContext2D} context @param {any} item */
  hatch(context, item) {
    const [left, top, right, bottom] = boundsOf(item.rects);
    context.beginPath();
    for (const [x, y, w, h] of item.rects) context.rect(x, y, w, h);
    context.clip();
    context.beginPath();
    // x + y constant, a multiple of 4: neighbouring hatches join.
    for (let sum = Math.floor((left + top) / 4) * 4; sum <= right + bottom; sum += 4) {
      context.moveTo(sum - top, top);
      context.lineTo(sum - bottom, bottom);
    }
    context.strokeStyle = item.stroke;
    context.lineWidth = 0.6;
    context.stroke();
  },
  /** @param {CanvasRenderingContext2D} context @param {any} item */
  cells(context, item) {
    if (item.rows * item.columns > MOST_CELLS) {
      context.imageSmoothingEnabled = false;
      context.drawImage(
        cellBitmap(item), item.x, item.y, item.w * item.columns, item.h * item.rows,
      );
      return;
    }
    for (let i = 0; i < item.rows; i++) {
      for (let j = 0; j < item.columns; j++) {
        const colour = item.colour(i, j);
        if (colour === null) continue;
        context.fillStyle = colour;
        context.fillRect(item.x + j * item.w, item.y + i * item.h, item.w, item.h);
      }
    }
  },
  /** @param {CanvasRenderingContext2D} context @param {any} item */
  put(context, item) {
    context.translate(item.x, item.y);
    for (const inner of item.other.items) paintItem(context, inner);
  },
};

/** One pixel a cell. @param {any} item */
function cellBitmap(item) {
  const bitmap = document.createElement("canvas");
  bitmap.width = item.columns;
  bitmap.height = item.rows;
  const context = /** @type {CanvasRenderingContext2D} */ (bitmap.getContext("2d"));
  for (let i = 0; i < item.rows; i++) {
    for (let j = 0; j < item.columns; j++) {
      const colour = item.colour(i, j);
      if (colour === null) continue;
      context.fillStyle = colour;
      context.fillRect(j, i, 1, 1);
    }
  }
  return bitmap;
}

/** @param {number[][]} rects */
function boundsOf(rects) {
  let [left, top, right, bottom] = [Infinity, Infinity, -Infinity, -Infinity];
  for (const [x, y, w, h] of rects) {
    left = Math.min(left, x);
    top = Math.min(top, y);
    right = Math.max(right, x + w);
    bottom = Math.max(bottom, y + h);
  }
  return [left, top, right, bottom];
}

/** The picture as an <svg> element. label: what a screen reader says; none hides it from one. */
export function pictureSvg(/** @type {Picture} */ picture, /** @type {string} */ label = "") {
  const svg = svgNode("svg", {
    width: picture.width, height: picture.height,
    viewBox: `0 0 ${round2(picture.width)} ${round2(picture.height)}`,
  });
  if (label) {
    svg.setAttribute("role", "img");
    svg.setAttribute("aria-label", label);
  } else svg.setAttribute("aria-hidden", "true");
  for (const item of picture.items) svg.append(...svgItems(item));
  return svg;
}

/** @param {string} name @param {Record<string, any>} attributes @param {any[]} children */
function svgNode(name, attributes, ...children) {
  const node = /** @type {SVGElement} */ (document.createElementNS(SVG_SPACE, name));
  for (const [key, value] of Object.entries(attributes)) {
    if (value === null || value === undefined) continue;
    node.setAttribute(key, typeof value === "number" ? String(round2(value)) : String(value));
  }
  node.append(...children);
  return node;
}

/** @param {number} value */
function round2(value) {
  return Math.round(value * 100) / 100;
}

/** @param {any} item @returns {Element[]} */
function svgItems(item) {
  const paint = { fill: item.fill ?? "none", stroke: item.stroke ?? null,
    "stroke-width": item.stroke ? item.line : null };
  switch (item.kind) {
    case "rect":
      return [svgNode("rect", { x: item.x, y: item.y, width: item.w, height: item.h, ...paint })];
    case "dot":
      return [svgNode("circle", { cx: item.x, cy: item.y, r: item.r, ...paint })];
    case "path": {
      const points = item.points.map((/** @type {Point} */ p) => p.map(round2).join(","));
      const dash = item.dash.length ? item.dash.join(" ") : null;
      return [svgNode("polyline",
        { points: points.join(" "), ...paint, "stroke-dasharray": dash })];
    }
    case "text":
      return [svgText(item)];
    case "hatch": {
      const id = `hatch${++patternCount}`;
      const pattern = svgNode(
        "pattern", { id, width: 4, height: 4, patternUnits: "userSpaceOnUse" },
        svgNode("path", { d: "M-1,1 l2,-2 M0,4 l4,-4 M3,5 l2,-2", stroke: item.stroke,
          "stroke-width": 0.6 }),
      );
      const rects = item.rects.map((/** @type {number[]} */ [x, y, width, height]) =>
        svgNode("rect", { x, y, width, height, fill: `url(#${id})` }));
      return [pattern, ...rects];
    }
    case "cells":
      return [svgCells(item)];
    default: {
      const group = svgNode("g", { transform: `translate(${round2(item.x)} ${round2(item.y)})` });
      for (const inner of item.other.items) group.append(...svgItems(inner));
      return [group];
    }
  }
}

/** @param {any} item */
function svgText(item) {
  const { style } = item;
  const node = svgNode("text", {
    "text-anchor": style.anchor ?? "start",
    "font-size": style.size ?? 11,
    "font-weight": style.weight ?? 400,
    "font-family": style.family ?? SANS_FAMILY,
    fill: style.fill ?? "#000",
    stroke: style.halo ?? null,
    "stroke-width": style.halo ? 3 : null,
    "paint-order": style.halo ? "stroke" : null,
    ...(style.turn
      ? { transform: `translate(${round2(item.x)} ${round2(item.y)}) rotate(-90)` }
      : { x: item.x, y: item.y }),
  });
  // An SVG file has no style sheet of its own.
  node.style.fontVariantNumeric = "tabular-nums";
  node.style.whiteSpace = "pre";
  let shift = 0;
  for (const run of runsOf(item.words)) {
    const y = { sub: 0.25, sup: -0.4, none: 0 }[run.shift ?? "none"] * (style.size ?? 11);
    node.append(svgNode("tspan", {
      dy: y === shift ? null : y - shift,
      "font-size": run.shift ? (style.size ?? 11) * 0.7 : null,
      "font-style": run.italic ?? style.italic ? "italic" : null,
      "font-weight": run.weight ?? null,
      "font-family": run.family ?? null,
      fill: run.fill ?? null,
    }, run.t));
    shift = y;
  }
  return node;
}

/** @param {any} item */
function svgCells(item) {
  if (item.rows * item.columns > MOST_CELLS) {
    const image = svgNode("image", {
      x: item.x, y: item.y, width: item.w * item.columns, height: item.h * item.rows,
      href: cellBitmap(item).toDataURL("image/png"), preserveAspectRatio: "none",
    });
    image.style.imageRendering = "pixelated";
    return image;
  }
  const group = svgNode("g", { "shape-rendering": "crispEdges" });
  for (let i = 0; i < item.rows; i++) {
    for (let j = 0; j < item.columns; j++) {
      const fill = item.colour(i, j);
      if (fill === null) continue;
      group.append(svgNode("rect", {
        x: item.x + j * item.w, y: item.y + i * item.h, width: item.w, height: item.h, fill,
      }));
    }
  }
  return group;
}

/** The picture on the page's colour, under a title and over the caption's lines. */
export function framePicture(
  /** @type {Picture} */ picture, /** @type {string} */ title, /** @type {string[]} */ caption,
  /** @type {Palette} */ palette,
) {
  const margin = 16;
  const style = { size: 11, fill: palette.ink2 };
  const width = Math.max(picture.width, 320, ...caption.map((line) =>
    Math.min(wordsWidth(line, style), 720))) + 2 * margin;
  const height = margin + 24 + picture.height + 8 + 16 * caption.length + margin;
  const framed = newPicture(Math.ceil(width), Math.ceil(height));
  framed.rect(0, 0, framed.width, framed.height, palette.bg);
  framed.text(margin, margin + 14, title, { size: 15, weight: 600, fill: palette.ink });
  framed.put(picture, margin, margin + 24);
  caption.forEach((line, index) => framed.text(
    margin, margin + 24 + picture.height + 20 + 16 * index,
    fitWords(line, width - 2 * margin, style), style,
  ));
  return framed;
}

/** The picture as a file. @returns {Promise<Blob>} */
export function pictureFile(
  /** @type {Picture} */ picture, /** @type {"svg"|"png"} */ kind,
) {
  if (kind === "svg") {
    const text = new XMLSerializer().serializeToString(pictureSvg(picture, "scaledot"));
    return Promise.resolve(new Blob([text], { type: "image/svg+xml" }));
  }
  const canvas = document.createElement("canvas");
  paintPicture(canvas, picture, 2);
  return new Promise((resolve, reject) => canvas.toBlob((blob) => {
    if (blob) resolve(blob);
    else reject(new Error("the browser gave no PNG: save the SVG instead"));
  }, "image/png"));
}

/** Hand a file to the reader, as the browser's own download. */
export function downloadFile(/** @type {Blob} */ blob, /** @type {string} */ name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

// ---------------------------------------------------------------- maps

/** @typedef {{x: number, y: number, cell: number, high: number, rows: number,
 *   columns: number}} Grid  where a matrix lies: its corner, the width and height of a cell, its shape */

/** Cells, hatching where hidden, and the page's colour between cells that are wide enough. */
export function drawMap(
  /** @type {Picture} */ p, /** @type {Grid} */ grid,
  /** @type {(i: number, j: number) => string|null} */ colour,
  /** @type {((i: number, j: number) => boolean)|null} */ hidden, /** @type {Palette} */ palette,
) {
  const { x, y, cell, high, rows, columns } = grid;
  p.cells(x, y, cell, high, rows, columns, colour);
  if (hidden) p.hatch(hiddenRuns(grid, hidden), palette.hatch);
  if (cell < 5 || high < 5) return;
  for (let i = 1; i < rows; i++) {
    p.rect(x, y + i * high - 0.5, columns * cell, 1, palette.bg);
  }
  for (let j = 1; j < columns; j++) p.rect(x + j * cell - 0.5, y, 1, rows * high, palette.bg);
}

/** The hidden cells as one rectangle a run of a row. @param {Grid} grid
 *  @param {(i: number, j: number) => boolean} hidden */
function hiddenRuns(grid, hidden) {
  const runs = [];
  for (let i = 0; i < grid.rows; i++) {
    let start = -1;
    for (let j = 0; j <= grid.columns; j++) {
      const here = j < grid.columns && hidden(i, j);
      if (here && start < 0) start = j;
      if (!here && start >= 0) {
        runs.push([
          grid.x + start * grid.cell, grid.y + i * grid.high, (j - start) * grid.cell, grid.high,
        ]);
        start = -1;
      }
    }
  }
  return runs;
}

/** The chosen row framed in the colour of choice, the chosen column between dashes of ink. */
export function drawCrosshair(
  /** @type {Picture} */ p, /** @type {Grid} */ grid, /** @type {number|null} */ row,
  /** @type {number|null} */ column, /** @type {Palette} */ palette,
) {
  const { x, y, cell, high, rows, columns } = grid;
  if (column !== null && column >= 0 && column < columns) {
    for (const at of [x + column * cell, x + (column + 1) * cell]) {
      const across = Math.round(at) + (at > x + cell * columns - 1 ? -0.5 : 0.5);
      p.path([[across, y], [across, y + rows * high]], palette.bg, 1);
      p.path([[across, y], [across, y + rows * high]], palette.ink, 1.25, [2, 2]);
    }
  }
  if (row !== null && row >= 0 && row < rows) {
    p.rect(x - 0.75, y + row * high - 0.25, columns * cell + 1.5, high + 0.5, null,
      palette.row, 1.5);
  }
}

const WIDE_SCRIPT =
  /^[\p{Script=Han}\p{Script=Hiragana}\p{Script=Katakana}\u3000-\u303f\uff01-\uff60ー]+$/u;

/** Whether a label is set in characters that stand upright in a column. */
export function standsUpright(/** @type {string} */ label) {
  return WIDE_SCRIPT.test(label);
}

/**
 * Which labels have room: all, every second or third where cells are narrower than a line of text,
 * below 8 px the chosen one alone. The chosen one's neighbours make way for it.
 *
 * @param {number} pitch  of the cells @param {number} size  of the text
 * @param {number|null} chosen
 * @returns {(index: number) => boolean}
 */
export function labelsShown(pitch, size, chosen) {
  const step = Math.ceil((size - 0.5) / pitch);
  return (index) => {
    if (index === chosen) return true;
    if (pitch < 8) return false;
    return index % step === 0 && (chosen === null || Math.abs(index - chosen) >= step);
  };
}

/** Column labels above a grid: kana and kanji upright or vertical, all others turned by −90°. */
export function drawColumnLabels(
  /** @type {Picture} */ p, /** @type {Grid} */ grid, /** @type {string[]} */ labels,
  /** @type {number|null} */ chosen, /** @type {Palette} */ palette,
  /** @type {{size?: number, most?: number}} */ options = {},
) {
  const size = options.size ?? 11;
  const most = options.most ?? 48;
  const base = { size, weight: 400, fill: palette.ink2 };
  const shows = labelsShown(grid.cell, size, chosen);
  labels.forEach((label, j) => {
    if (!shows(j)) return;
    const style = j === chosen ? { ...base, weight: 700, fill: palette.ink } : base;
    const middle = grid.x + (j + 0.5) * grid.cell;
    if (!standsUpright(label)) {
      p.text(middle + size * 0.36, grid.y - 5, fitWords(label, most, style),
        { ...style, turn: true });
      return;
    }
    const room = Math.max(1, Math.floor(most / size));
    const characters = [...label];
    const shown = characters.length > room ? [...characters.slice(0, room - 1), "…"] : characters;
    shown.forEach((character, index) => p.text(
      middle, grid.y - 6 - (shown.length - 1 - index) * size * 1.05, character,
      { ...style, anchor: "middle" },
    ));
  });
}

/** Row labels at the left of a grid, right-aligned; the chosen one in the colour of choice. */
export function drawRowLabels(
  /** @type {Picture} */ p, /** @type {Grid} */ grid, /** @type {string[]} */ labels,
  /** @type {number|null} */ chosen, /** @type {Palette} */ palette,
  /** @type {{size?: number, most?: number}} */ options = {},
) {
  const size = options.size ?? 11;
  const base = { size, weight: 400, fill: palette.ink2, anchor: /** @type {"end"} */ ("end") };
  const shows = labelsShown(grid.high, size, chosen);
  labels.forEach((label, i) => {
    if (!shows(i)) return;
    const style = i === chosen ? { ...base, weight: 700, fill: palette.row } : base;
    p.text(grid.x - 6, grid.y + (i + 0.5) * grid.high + size * 0.36,
      fitWords(label, options.most ?? 52, style), style);
  });
}

/** The cell of a grid that holds a point, or null outside. @returns {[number, number]|null} */
export function cellAt(
  /** @type {Grid} */ grid, /** @type {number} */ x, /** @type {number} */ y,
) {
  const j = Math.floor((x - grid.x) / grid.cell);
  const i = Math.floor((y - grid.y) / grid.high);
  return i < 0 || j < 0 || i >= grid.rows || j >= grid.columns ? null : [i, j];
}

// ---------------------------------------------------------------- charts

/** A ramp of colours from low to high: the axis that a histogram stands on. */
export function drawRamp(
  /** @type {Picture} */ p, /** @type {number} */ x, /** @type {number} */ y,
  /** @type {number} */ width, /** @type {number} */ height,
  /** @type {(part: number) => string} */ colour,
) {
  // A step a pixel: wider ones leave seams between them.
  const steps = Math.max(1, Math.round(width));
  p.cells(x, y, width / steps, height, 1, steps, (_, j) => colour((j + 0.5) / steps));
}

/** Counts as bars on their ramp, the mean as a tick through them, one s.d. as a bar beneath. */
export function drawHistogram(
  /** @type {Picture} */ p,
  /** @type {{x: number, y: number, width: number, height: number}} */ box,
  /** @type {{counts: ArrayLike<number>, low: number, high: number, mean: number, sd: number}} */
  found,
  /** @type {(part: number) => string} */ colour, /** @type {Palette} */ palette,
) {
  const { x, y, width, height } = box;
  const bars = found.counts.length;
  const most = Math.max(1, ...Array.from(found.counts));
  const foot = y + height;
  for (let b = 0; b < bars; b++) {
    const tall = (found.counts[b] / most) * height;
    if (!tall) continue;
    const left = x + (b / bars) * width;
    p.rect(left + 0.25, foot - Math.max(tall, 0.75), width / bars - 0.5, Math.max(tall, 0.75),
      colour((b + 0.5) / bars), palette.ink3, 0.5);
  }
  drawRamp(p, x, foot + 1, width, 5, colour);
  if (!Number.isFinite(found.mean)) return;
  const span = found.high - found.low || 1;
  const at = (/** @type {number} */ value) =>
    x + Math.min(1, Math.max(0, (value - found.low) / span)) * width;
  p.rect(at(found.mean) - 0.75, y - 2, 1.5, height + 9, palette.ink);
  const [from, to] = [at(found.mean - found.sd), at(found.mean + found.sd)];
  p.rect(from, foot + 10, to - from, 1.5, palette.ink);
}

/** Two dots on a line with ends, and a thick tick where theory is: one statistic in place. */
export function drawStrip(
  /** @type {Picture} */ p, /** @type {number} */ y,
  /** @type {{width: number, row: number|null, head: number|null, theory?: number|null}} */ parts,
  /** @type {Palette} */ palette,
) {
  const [left, right] = [0.5, parts.width - 0.5];
  p.rect(left, y - 0.5, right - left, 1, palette.rule2);
  for (const end of [left, right]) p.rect(end - 0.5, y - 4, 1, 8, palette.rule2);
  const at = (/** @type {number} */ part) =>
    left + Math.min(1, Math.max(0, part)) * (right - left);
  if (parts.theory !== null && parts.theory !== undefined) {
    p.rect(at(parts.theory) - 1.25, y - 7, 2.5, 14, palette.ink);
  }
  if (parts.head !== null) p.dot(at(parts.head), y, 4, palette.bg, palette.ink, 1.5);
  if (parts.row !== null) p.dot(at(parts.row), y, 4.5, palette.row);
}

/** An arrow to the right: the operator between two stages. */
export function drawArrow(
  /** @type {Picture} */ p, /** @type {number} */ x, /** @type {number} */ y,
  /** @type {number} */ length, /** @type {string} */ colour,
) {
  p.path([[x, y], [x + length, y]], colour, 1.25);
  p.path([[x + length - 6, y - 4], [x + length, y], [x + length - 6, y + 4]], colour, 1.25);
}
