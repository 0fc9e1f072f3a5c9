// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

import { useEffect, useRef, useState } from "preact/hooks";
import type { Flow, Node } from "./api";
import { useAsked } from "./pages";
import { Table } from "./table";
import type { Words } from "./words";

const kinds = ["producer", "topic", "group", "dependency"] as const;

// Sizes in pixels: of a node, and from one to the next.
const width = 190;
const height = 34;
const acrossStep = 300;
const downStep = 54;

const keyOf = (n: Node) => JSON.stringify([n.kind, n.name]);
const wayOf = (f: Flow) => keyOf(f.from) + keyOf(f.to);

// Beyond so many nodes or ways there is no picture, and the table ends.
const mostNodes = 100;
const mostWays = 300;

type Rate = { calls: number; failed: number };

// useRates are calls a second between the last two answers.
function useRates(flows?: Flow[]): Map<string, Rate> {
  const before = useRef<{ at: number; flows: Map<string, Flow> } | null>(null);
  const [rates, setRates] = useState(new Map<string, Rate>());
  useEffect(() => {
    if (!flows) {
      return;
    }
    const now = Date.now();
    const was = before.current;
    if (was && now > was.at) {
      const of = (n: number, old: number) => (Math.max(0, n - old) * 1000) / (now - was.at);
      setRates(
        new Map(
          flows.map((f) => {
            const old = was.flows.get(wayOf(f)) ?? f; // of a new way nothing is known yet
            return [wayOf(f), { calls: of(f.count, old.count), failed: of(f.failed, old.failed) }];
          }),
        ),
      );
    }
    before.current = { at: now, flows: new Map(flows.map((f) => [wayOf(f), f])) };
  }, [flows]);
  return rates;
}

// place gives each node its column by its kind, and in the column the middle of those that
// lead to it, so that few ways cross.
function place(flows: Flow[]): Map<string, Node & { x: number; y: number }> {
  const nodes = new Map<string, Node>();
  for (const f of flows) {
    nodes.set(keyOf(f.from), f.from).set(keyOf(f.to), f.to);
  }
  const columns = kinds.map((kind) => [...nodes.values()].filter((n) => n.kind === kind)).filter((c) => c.length > 0);
  const placed = new Map<string, Node & { x: number; y: number }>();
  const tallest = Math.max(...columns.map((c) => c.length));
  columns.forEach((column, i) => {
    const middle = (n: Node) => {
      const ys = flows.filter((f) => keyOf(f.to) === keyOf(n)).map((f) => placed.get(keyOf(f.from))?.y ?? 0);
      return ys.length === 0 ? 0 : ys.reduce((a, b) => a + b) / ys.length;
    };
    const order = column.map((n) => ({ n, at: middle(n) })).sort((a, b) => a.at - b.at || (a.n.name < b.n.name ? -1 : 1));
    const top = ((tallest - column.length) * downStep) / 2;
    order.forEach(({ n }, k) => placed.set(keyOf(n), { ...n, x: i * acrossStep, y: top + k * downStep }));
  });
  return placed;
}

const short = (name: string) => (name.length > 24 ? name.slice(0, 23) + "…" : name);
const rate = (n: number) => (n >= 10 ? n.toFixed(0) : n.toFixed(1)) + "/s";

export function Topology({ w }: { w: Words }) {
  const [flows] = useAsked<Flow[]>("topology", 2000);
  const rates = useRates(flows);
  const all = (flows ?? []).slice(0, mostWays);
  const nodes = all.length > 0 ? place(all) : new Map<string, Node & { x: number; y: number }>();
  const looked = new Map<string, number>(); // messages whose producer was looked up, by topic
  for (const f of all) {
    if (f.from.kind === "producer") {
      looked.set(keyOf(f.to), (looked.get(keyOf(f.to)) ?? 0) + f.count);
    }
  }
  const xs = [...nodes.values()];
  const bad = (f: Flow) => f.held > 0 || (rates.get(wayOf(f))?.failed ?? 0) > 0;
  const says = (f: Flow): string => {
    const r = rates.get(wayOf(f));
    if (f.from.kind === "producer") {
      return ((100 * f.count) / (looked.get(keyOf(f.to)) ?? 1)).toFixed(0) + " %";
    }
    return r ? rate(r.calls) + (r.failed > 0 ? " · " + w.failing(rate(r.failed)) : "") : "";
  };
  return (
    <>
      <h1>{w.topology}</h1>
      <p>{w.topologyAbout}</p>
      {flows && all.length === 0 && <p>{w.noHistory}</p>}
      {all.length > 0 && (
        <>
          {xs.length <= mostNodes && (
            <div class="wide" tabIndex={0} role="region" aria-label={w.topology}>
              <svg
                class="graph"
                role="img"
                aria-label={w.topologySummary(xs.length, all.length)}
                width={Math.max(...xs.map((n) => n.x)) + width + 2}
                height={Math.max(...xs.map((n) => n.y)) + height + 2}
              >
                {all.map((f) => {
                  const a = nodes.get(keyOf(f.from))!;
                  const b = nodes.get(keyOf(f.to))!;
                  const [x1, y1, x2, y2] = [a.x + width, a.y + height / 2, b.x, b.y + height / 2];
                  const bend = (x2 - x1) / 2;
                  return (
                    <g key={wayOf(f)} class={bad(f) ? "way bad" : "way"}>
                      <path d={`M${x1},${y1} C${x1 + bend},${y1} ${x2 - bend},${y2} ${x2},${y2}`} />
                      <text x={(x1 + x2) / 2} y={(y1 + y2) / 2 - 5}>
                        {says(f)}
                      </text>
                    </g>
                  );
                })}
                {xs.map((n) => (
                  <g key={keyOf(n)} class={"node " + n.kind}>
                    <title>{n.name}</title>
                    <rect x={n.x + 1} y={n.y + 1} width={width} height={height} rx={n.kind === "topic" ? 0 : 8} />
                    <text x={n.x + width / 2} y={n.y + height / 2 + 5}>
                      {short(n.name)}
                    </text>
                  </g>
                ))}
              </svg>
            </div>
          )}
          <Table
            columns={[
              [w.from, "name"],
              [w.to, "name"],
              [w.rate, "number"],
              [w.total, "number"],
              [w.failures, "number"],
              [w.held, "number"],
            ]}
            rows={all.map((f) => [
              wayOf(f),
              `${w.kinds[f.from.kind]} ${f.from.name}`,
              `${w.kinds[f.to.kind]} ${f.to.name}`,
              says(f),
              f.count.toLocaleString("en"),
              f.failed.toLocaleString("en"),
              f.sources > 0 ? `${f.held} / ${f.sources}` : "",
            ])}
          />
        </>
      )}
    </>
  );
}
