// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

import { answer } from "./answers";
import type { FleetStatus, JournalEntry, Limit, Member } from "./api";
import { State, useAsked, when } from "./pages";
import { Table } from "./table";
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

function Heard({ w, m }: { w: Words; m: Member }) {
  const ago = m.heard_ns > 0 ? ` (${span(m.heard_ns / 1e9)})` : "";
  return here(m) ? <span class="state running">{w.yes}</span> : <span class="state storm">{w.no + ago}</span>;
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
        <Table
          columns={[
            [w.process, "name"],
            w.zoneName,
            w.heard,
            [w.weight, "number"],
            [w.shareOf, "number"],
            [w.tokens, "number"],
            [w.configuration, "number"],
            [w.delay, "number"],
          ]}
          rows={fleet.members.map((m) => [
            m.name,
            m.name,
            m.zone,
            <Heard w={w} m={m} />,
            m.weight,
            (100 * m.share).toFixed(1) + " %",
            number(m.level) + " / " + number(m.cap),
            m.applied,
            (m.sync_delay_ns / 1e6).toFixed(1) + " ms",
          ])}
        />
      </section>
      <section>
        <h2>{w.limits}</h2>
        <p>{w.limitsAre(c.number, c.settled, limit(w, c.limit))}</p>
        <Table
          columns={[
            [w.key, "name"],
            w.limits,
            [w.admitted, "number"],
            [w.denied, "number"],
          ]}
          rows={byKey(fleet.members, limits).map(([key, n]) => [
            key,
            key,
            limit(w, limits.get(key) ?? c.limit),
            number(n.admitted),
            number(n.denied),
          ])}
        />
      </section>
      {fleet.scopes && fleet.scopes.length > 0 && (
        <section>
          <h2>{w.fleetBreakers}</h2>
          <Table
            columns={[[w.breaker, "name"], w.state, w.why]}
            rows={fleet.scopes.map((s) => [s.name, s.name, s.held ? <State w={w} s="breaker" /> : state(w, s.state), answer(w, s.cause ?? "")])}
          />
        </section>
      )}
      <section>
        <h2>{w.journal}</h2>
        <Table
          columns={[w.time, [w.process, "name"], w.what, [w.subject, "name"], w.why]}
          rows={(journal ?? [])
            .slice(-mostEntries)
            .reverse()
            .map((e, i) => [i, when(e.at), e.by, e.number ? `${e.kind} ${e.number}` : e.kind, e.subject, e.text])}
        />
      </section>
    </>
  );
}
