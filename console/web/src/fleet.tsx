// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

import type { FleetStatus, JournalEntry, Limit, Member } from "./api";
import { State, useAsked, when } from "./pages";
import { type Words, span, state } from "./words";

const mostEntries = 200;

const number = (n: number) => (Number.isInteger(n) ? n.toLocaleString("en") : n.toFixed(1));
const limit = (w: Words, l: Limit) => w.limitOf(number(l.rate), number(l.burst));
const here = (m: Member) => m.state === "self" || m.state === "fresh";

// byKey is how many of a key all members together admitted and denied, and each key that has a
// limit of its own.
function byKey(members: Member[], limits: Map<string, Limit>): [string, { admitted: number; denied: number }][] {
  const sums = new Map([...limits.keys()].map((key) => [key, { admitted: 0, denied: 0 }]));
  for (const k of members.flatMap((m) => m.keys ?? [])) {
    const sum = sums.get(k.key) ?? { admitted: 0, denied: 0 };
    sums.set(k.key, { admitted: sum.admitted + k.admitted, denied: sum.denied + k.denied });
  }
  return [...sums].sort((a, b) => b[1].admitted - a[1].admitted);
}

export function Fleet({ w, joined }: { w: Words; joined: boolean }) {
  return (
    <>
      <h1>{w.fleet}</h1>
      {joined ? <Joined w={w} /> : <p>{w.alone}</p>}
    </>
  );
}

function Joined({ w }: { w: Words }) {
  const [fleet] = useAsked<FleetStatus>("fleet/status", 1000);
  const [journal] = useAsked<JournalEntry[]>("fleet/journal", 2000);
  if (!fleet) {
    return null;
  }
  const c = fleet.configuration;
  const limits = new Map(Object.entries(c.limits ?? {})); // a key may be called constructor
  return (
    <>
      {(c.problem || c.away) && (
        <p role="alert">
          {c.problem} {c.away}
        </p>
      )}
      <section>
        <h2>{w.members}</h2>
        <div class="wide">
          <table>
            <thead>
              <tr>
                <th>{w.process}</th>
                <th>{w.zoneName}</th>
                <th>{w.heard}</th>
                <th class="number">{w.weight}</th>
                <th class="number">{w.shareOf}</th>
                <th class="number">{w.tokens}</th>
                <th class="number">{w.configuration}</th>
                <th class="number">{w.delay}</th>
              </tr>
            </thead>
            <tbody>
              {fleet.members.map((m) => (
                <tr key={m.name}>
                  <td class="name">{m.name}</td>
                  <td>{m.zone}</td>
                  <td>
                    <span class={"state " + (here(m) ? "running" : "storm")}>{here(m) ? w.yes : m.heard_ns > 0 ? `${w.no} (${span(m.heard_ns / 1e9)})` : w.no}</span>
                  </td>
                  <td class="number">{m.weight}</td>
                  <td class="number">{(100 * m.share).toFixed(1)} %</td>
                  <td class="number">
                    {number(m.level)} / {number(m.cap)}
                  </td>
                  <td class="number">{m.applied}</td>
                  <td class="number">{(m.sync_delay_ns / 1e6).toFixed(1)} ms</td>
                </tr>
              ))}
            </tbody>
          </table>
        </div>
      </section>
      <section>
        <h2>{w.limits}</h2>
        <p>{w.limitsAre(c.number, c.settled, limit(w, c.limit))}</p>
        <div class="wide">
          <table>
            <thead>
              <tr>
                <th>{w.key}</th>
                <th>{w.limits}</th>
                <th class="number">{w.admitted}</th>
                <th class="number">{w.denied}</th>
              </tr>
            </thead>
            <tbody>
              {byKey(fleet.members, limits).map(([key, n]) => (
                <tr key={key}>
                  <td class="name">{key}</td>
                  <td>{limit(w, limits.get(key) ?? c.limit)}</td>
                  <td class="number">{number(n.admitted)}</td>
                  <td class="number">{number(n.denied)}</td>
                </tr>
              ))}
            </tbody>
          </table>
        </div>
      </section>
      {fleet.scopes && fleet.scopes.length > 0 && (
        <section>
          <h2>{w.fleetBreakers}</h2>
          <div class="wide">
            <table>
              <thead>
                <tr>
                  <th>{w.breaker}</th>
                  <th>{w.state}</th>
                  <th>{w.why}</th>
                </tr>
              </thead>
              <tbody>
                {fleet.scopes.map((s) => (
                  <tr key={s.name}>
                    <td class="name">{s.name}</td>
                    <td>{s.held ? <State w={w} s="breaker" /> : state(w, s.state)}</td>
                    <td>{s.cause}</td>
                  </tr>
                ))}
              </tbody>
            </table>
          </div>
        </section>
      )}
      <section>
        <h2>{w.journal}</h2>
        <div class="wide">
          <table>
            <thead>
              <tr>
                <th>{w.time}</th>
                <th>{w.process}</th>
                <th>{w.what}</th>
                <th>{w.subject}</th>
                <th>{w.why}</th>
              </tr>
            </thead>
            <tbody>
              {(journal ?? [])
                .slice(-mostEntries)
                .reverse()
                .map((e, i) => (
                  <tr key={i}>
                    <td>{when(e.at)}</td>
                    <td class="name">{e.by}</td>
                    <td>
                      {e.kind}
                      {e.number ? ` ${e.number}` : ""}
                    </td>
                    <td class="name">{e.subject}</td>
                    <td>{e.text}</td>
                  </tr>
                ))}
            </tbody>
          </table>
        </div>
      </section>
    </>
  );
}
