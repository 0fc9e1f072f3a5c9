// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

import { useEffect, useRef, useState } from "preact/hooks";
import type { History } from "./api";
import { link, useAsked } from "./pages";
import { type Words, state } from "./words";

// What a cell stands for, in the order of the legend.
const reasons: [string, string][] = [
  ["r", "running"],
  ["p", "backpressure"],
  ["l", "limiter"],
  ["o", "operator"],
  ["b", "breaker"],
  ["s", "storm"],
  ["d", "dlq"],
];

const names = 180; // pixels for the names of sources

// Heat draws one row for each source and one column for each minute. Cells of one colour
// beside each other are one rectangle: a row mostly is a handful.
export function Heat({ w, theme }: { w: Words; theme: string }) {
  const [history] = useAsked<History>("history", 5000);
  const canvas = useRef<HTMLCanvasElement>(null);
  const [hint, setHint] = useState("");
  const rows = history?.rows ?? [];
  const height = rows.length > 100 ? 4 : rows.length > 40 ? 10 : 18;

  useEffect(() => {
    const c = canvas.current;
    if (!c || rows.length === 0) {
      return;
    }
    const draw = () => {
      const started = performance.now();
      const scale = window.devicePixelRatio || 1;
      const width = c.clientWidth;
      c.width = width * scale;
      c.height = rows.length * height * scale;
      const g = c.getContext("2d")!;
      g.scale(scale, scale);
      const style = getComputedStyle(document.documentElement);
      const colors = new Map(reasons.map(([cell, name]) => [cell, style.getPropertyValue("--" + name)]));
      g.font = "12px system-ui, sans-serif";
      g.textBaseline = "middle";
      rows.forEach((row, y) => {
        if (height >= 10) {
          g.fillStyle = style.getPropertyValue("--text");
          g.fillText(row.source, 0, (y + 0.5) * height, names - 8);
        }
        const step = (width - names) / row.cells.length;
        for (let x = 0; x < row.cells.length; ) {
          const cell = row.cells[x]!;
          let end = x + 1;
          while (end < row.cells.length && row.cells[end] === cell) {
            end++;
          }
          if (cell !== " ") {
            g.fillStyle = colors.get(cell) ?? "";
            g.fillRect(names + x * step, y * height, (end - x) * step, height - 1);
          }
          x = end;
        }
      });
      c.dataset["drawn"] = (performance.now() - started).toFixed(1);
    };
    draw();
    window.addEventListener("resize", draw);
    return () => window.removeEventListener("resize", draw);
  }, [history, theme]);

  const at = (e: MouseEvent) => rows[Math.floor(e.offsetY / height)];
  const say = (e: MouseEvent) => {
    const row = at(e);
    const c = canvas.current!;
    const x = Math.floor(((e.offsetX - names) / (c.clientWidth - names)) * (row?.cells.length ?? 0));
    const cell = reasons.find(([cell]) => cell === row?.cells[x]);
    if (!row || !history) {
      setHint("");
      return;
    }
    const time = new Date(new Date(history.now).getTime() - (row.cells.length - 1 - x) * history.every_seconds * 1000);
    setHint(row.source + (cell ? ` · ${time.toLocaleTimeString("sv")} · ${state(w, cell[1])}` : ""));
  };
  const held = rows.filter((r) => /[plobsd]/.test(r.cells)).length;
  return (
    <>
      <h1>{w.heat}</h1>
      <p>{w.heatAbout}</p>
      <ul class="legend">
        {reasons.map(([, name]) => (
          <li key={name}>
            <span class={"swatch " + name} />
            {state(w, name)}
          </li>
        ))}
      </ul>
      {history && rows.length === 0 && <p>{w.noHistory}</p>}
      <p class="hint" aria-live="off">
        {hint || " "}
      </p>
      <canvas
        ref={canvas}
        class="heat"
        style={{ height: `${rows.length * height}px` }}
        role="img"
        aria-label={w.heatSummary(rows.length, held)}
        onMouseMove={say}
        onMouseLeave={() => setHint("")}
        onClick={(e) => {
          const row = at(e);
          if (row) {
            location.hash = link(row.source);
          }
        }}
      />
      {rows.length > 0 && (
        <p class="axis">
          <span>{w.ago}</span>
          <span>{w.now}</span>
        </p>
      )}
    </>
  );
}
