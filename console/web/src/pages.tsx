// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

import { useEffect, useState } from "preact/hooks";
import { type Cause, type Entry, type Event, type Order, type Rule, type Seen, type Source, type Status, clipped, get, mostRuleWhy, post } from "./api";
import { answer } from "./answers";
import { OrderDialog } from "./order";
import { Table } from "./table";
import { type Words, span, state, todo } from "./words";

export const link = (name: string) => "#/sources/" + encodeURIComponent(name);

export function State({ w, s }: { w: Words; s: string }) {
  return <span class={"state " + s}>{state(w, s)}</span>;
}

export function Now({ w, status }: { w: Words; status: Status }) {
  const cards: [string, number, boolean][] = [
    [w.sources, status.sources, false],
    [w.held, status.held, true],
    [w.storms, status.storms, true],
    [w.breakersOpen, status.breakers, true],
    [w.unsettled, status.unsettled, false],
    [w.dead, status.dead_lettered, false],
  ];
  return (
    <>
      <h1>{w.now}</h1>
      <dl class="cards">
        {cards.map(([name, n, bad]) => (
          <div key={name} class={bad && n > 0 ? "bad" : ""}>
            <dt>{name}</dt>
            <dd>{n.toLocaleString("en")}</dd>
          </div>
        ))}
      </dl>
      {status.attention.length === 0 ? (
        <p class="calm">{w.nothingHeld}</p>
      ) : (
        <section>
          <h2>{w.attention}</h2>
          <Table
            columns={[w.source, w.state, w.why, w.todo, w.clearedBy]}
            rows={status.attention.map((a, i) => [
              i,
              <a href={link(a.source)}>{a.source}</a>,
              <State w={w} s={a.reason} />,
              answer(w, a.detail),
              todo(w, a.reason),
              answer(w, a.cleared_by),
            ])}
          />
        </section>
      )}
    </>
  );
}

const mostShown = 200;

export const unsettled = (s: Source) => s.waiting + s.processing + s.settling + s.held + s.retry_wait;

export function Sources({ w, all }: { w: Words; all: Source[] }) {
  const [filter, setFilter] = useState("");
  const found = all.filter((s) => s.name.includes(filter) || s.state === filter);
  const shown = found.slice(0, mostShown);
  return (
    <>
      <h1>{w.sources}</h1>
      <label>
        {w.filter}
        <input type="search" value={filter} onInput={(e) => setFilter(e.currentTarget.value)} />
      </label>
      <p>{w.shown(shown.length, all.length)}</p>
      <Table
        columns={[w.source, w.group, w.state, w.breaker, [w.unsettled, "number"], [w.oldest, "number"], [w.dead, "number"]]}
        rows={shown.map((s) => [
          s.group + " " + s.name,
          <a href={link(s.name)}>{s.name}</a>,
          s.group,
          <State w={w} s={s.state} />,
          s.breaker.name && state(w, s.breaker.state),
          unsettled(s),
          span(s.oldest_age_seconds),
          s.dead_lettered,
        ])}
      />
    </>
  );
}

export function SourcePage({ w, s, name }: { w: Words; s?: Seen; name: string }) {
  const [asked, setAsked] = useState<{ title: string; order: Order }>();
  const [whole] = useAsked<Source[]>("sources?name=" + encodeURIComponent(name), 2000);
  const errors = whole?.[0]?.errors ?? [];
  if (!s) {
    return (
      <>
        <h1 class="name">{name}</h1>
        <p>{w.gone}</p>
      </>
    );
  }
  const passed = (Date.now() - s.at) / 1000;
  const sources = [s.name];
  const breakers = [s.breaker.name];
  const letters = s.window > 0; // a protected function has none
  const actions: [string, Order, boolean][] = [
    [w.pause, { action: "pause", sources }, s.state !== "paused"],
    [w.resume, { action: "resume", sources }, s.holds.some((h) => h.reason === "operator")],
    [w.open, { action: "open", breakers }, s.breaker.name !== ""],
    [w.close, { action: "close", breakers }, s.breaker.name !== "" && s.breaker.state !== "closed"],
    [w.release, { action: "release", breakers }, s.breaker.forced],
    [w.grant, { action: "credits", sources }, letters],
    [w.deadletter, { action: "deadletter", sources }, letters && s.waiting + s.held + s.retry_wait > 0],
  ];
  return (
    <>
      <h1 class="name">{s.name}</h1>
      <p>
        <State w={w} s={s.state} /> {w.group}: {s.group}
      </p>
      {s.holds.map((h) => (
        <p key={h.reason} class="hold">
          <State w={w} s={h.reason} /> {answer(w, h.detail)}. {todo(w, h.reason)} {w.until}:{" "}
          {h.until_seconds > 0 ? span(Math.max(0, h.until_seconds - passed)) : w.untilCleared}. {w.clearedBy}: {answer(w, h.cleared_by)}.
        </p>
      ))}
      <div class="columns">
        <Facts
          title={w.messages}
          of={[
            [w.waiting, s.waiting],
            [w.processing, s.processing],
            [w.settling, s.settling],
            [w.holding, s.held],
            [w.retryWait, s.retry_wait],
            [w.spilled, s.spilled],
            [w.window, s.window],
            [w.oldest, span(s.oldest_age_seconds)],
          ]}
        />
        <Facts
          title={w.since}
          of={[
            [w.received, s.received],
            [w.acked, s.acked],
            [w.failures, s.failures],
            [w.dead, s.dead_lettered],
            [w.returned, s.returned],
            [w.quarantined, s.quarantined],
            [w.credits, s.credits.toFixed(1)],
          ]}
        />
        <Facts
          title={w.breaker}
          of={[
            [w.breaker, s.breaker.name || w.none],
            [w.state, state(w, s.breaker.state) + (s.breaker.forced ? " " + w.forced : "") + (s.breaker.fleet ? " " + w.byFleet : "")],
            [w.why, s.breaker.cause ? answer(w, s.breaker.cause) : w.none],
            [s.breaker.state === "closed" ? w.stateFor : w.notClosedFor, span(s.breaker.since_seconds + passed)],
          ]}
        />
        <Facts
          title={w.detector}
          of={[
            [w.errorRate, (100 * s.storm.error_rate).toFixed(1) + " %"],
            [w.attempts, s.storm.attempts],
            [w.age, span(s.storm.age_seconds)],
          ]}
        />
      </div>
      {errors.length > 0 && (
        <>
          <h2>{w.errorsInHand}</h2>
          <Table
            columns={[[w.messages, "number"], w.error, [w.attempts, "number"]]}
            rows={errors.slice(0, mostShown).map((e) => [e.cause, e.messages, e.title, e.attempts])}
          />
        </>
      )}
      <h2>{w.actions}</h2>
      <p class="buttons">
        {actions.map(([title, order, can]) => (
          <button key={order.action} type="button" disabled={!can} onClick={() => setAsked({ title, order })}>
            {title}
          </button>
        ))}
      </p>
      {asked && <OrderDialog w={w} title={asked.title} order={asked.order} close={() => setAsked(undefined)} />}
    </>
  );
}

function Facts({ title, of }: { title: string; of: [string, string | number][] }) {
  return (
    <section>
      <h2>{title}</h2>
      <dl class="facts">
        {of.map(([name, value]) => (
          <div key={name}>
            <dt>{name}</dt>
            <dd>{typeof value === "number" ? value.toLocaleString("en") : value}</dd>
          </div>
        ))}
      </dl>
    </section>
  );
}

// useAsked asks for a path at once and every few seconds. again asks now.
export function useAsked<T>(path: string, every: number): [T | undefined, () => void] {
  const [value, setValue] = useState<T>();
  const [asked, again] = useState(0);
  useEffect(() => {
    let gone = false;
    const ask = () =>
      get<T>(path).then(
        (v) => gone || setValue(v),
        () => {}, // the shell says that the console is away
      );
    void ask();
    const tick = setInterval(ask, every);
    return () => {
      gone = true;
      clearInterval(tick);
    };
  }, [path, every, asked]);
  return [value, () => again(asked + 1)];
}

export const when = (at: string) => new Date(at).toLocaleString("sv");

export function Quarantine({ w }: { w: Words }) {
  const [rules, again] = useAsked<Rule[]>("quarantine", 2000);
  const [failed, setFailed] = useState("");
  const change = async (body: object): Promise<boolean> => {
    setFailed("");
    again();
    try {
      await post("quarantine", body);
      again();
      return true;
    } catch (e) {
      setFailed((e as Error).message);
      return false;
    }
  };
  const add = async (e: SubmitEvent) => {
    e.preventDefault();
    const form = e.target as HTMLFormElement;
    const text = (name: string) => String(new FormData(form).get(name));
    const rule = text("kind") === "header" ? "header:" + text("value") : text("kind") + "=" + text("value");
    if (await change({ rule, why: clipped(text("why"), mostRuleWhy) })) {
      form.reset();
    }
  };
  return (
    <>
      <h1>{w.quarantine}</h1>
      <p>{w.quarantineAbout}</p>
      {rules?.length === 0 && <p class="calm">{w.noRules}</p>}
      {rules && rules.length > 0 && (
        <Table
          columns={[[w.rule, "name"], w.by, w.why, w.ends, w.actions]}
          rows={rules.map((r) => [
            r.rule,
            r.rule,
            r.by,
            r.why,
            when(r.until),
            <button type="button" onClick={() => confirm(w.removeSure(r.rule)) && void change({ rule: r.rule, remove: true })}>
              {w.remove}
            </button>,
          ])}
        />
      )}
      <h2>{w.add}</h2>
      <form onSubmit={(e) => void add(e)}>
        <label>
          {w.kind}
          <select name="kind">
            <option value="key">{w.key}</option>
            <option value="header">{w.header}</option>
            <option value="cause">{w.cause}</option>
          </select>
        </label>
        <label>
          {w.value}
          <input name="value" required placeholder={w.valueHint} />
        </label>
        <label>
          {w.reason}
          <input name="why" maxLength={200} />
        </label>
        {failed && <p role="alert">{failed}</p>}
        <button type="submit">{w.add}</button>
      </form>
    </>
  );
}

export function Causes({ w }: { w: Words }) {
  const [causes] = useAsked<Cause[]>("causes?since=6h", 2000);
  const [rules, again] = useAsked<Rule[]>("quarantine", 2000);
  const [failed, setFailed] = useState("");
  const add = (c: Cause) => {
    setFailed("");
    post("quarantine", { rule: "cause=" + c.cause, why: clipped(c.title, mostRuleWhy) }).then(again, (e: unknown) => setFailed((e as Error).message));
  };
  const inForce = (c: Cause) => rules?.some((r) => r.rule === "cause=" + c.cause);
  return (
    <>
      <h1>{w.causes}</h1>
      <p>{w.causesAbout}</p>
      {failed && <p role="alert">{failed}</p>}
      {causes?.length === 0 && <p class="calm">{w.noCauses}</p>}
      {causes && causes.length > 0 && (
        <Table
          columns={[[w.dead, "number"], w.error, w.sources, w.last, w.actions]}
          rows={causes.slice(0, mostShown).map((c) => [
            c.cause,
            c.count,
            c.title,
            c.sources.map((name) => (
              <a key={name} class="name" href={link(name)}>
                {name}{" "}
              </a>
            )),
            when(c.last),
            c.class === "dependency" ? (
              w.ofDependency
            ) : inForce(c) ? (
              w.inQuarantine
            ) : (
              <button type="button" disabled={!c.cause} onClick={() => confirm(w.quarantineSure(c.title)) && add(c)}>
                {w.quarantineIt}
              </button>
            ),
          ])}
        />
      )}
    </>
  );
}

export function Events({ w }: { w: Words }) {
  const [events] = useAsked<Event[]>("events?since=6h", 2000);
  return (
    <>
      <h1>{w.events}</h1>
      {events?.length === 0 && <p class="calm">{w.noEvents}</p>}
      {events && events.length > 0 && (
        <Table
          columns={[w.time, w.what, [w.source, "name"], w.why]}
          rows={events
            .slice(-mostShown)
            .reverse()
            .map((e, i) => [
              i,
              when(e.at),
              answer(w, e.kind) + (e.count ? ` ×${e.count}` : ""),
              e.subject,
              answer(w, e.detail ?? "") + (e.lasted_seconds ? ` (${span(e.lasted_seconds)})` : ""),
            ])}
        />
      )}
    </>
  );
}

export function Audit({ w }: { w: Words }) {
  const [entries] = useAsked<Entry[]>("audit", 2000);
  return (
    <>
      <h1>{w.audit}</h1>
      {entries?.length === 0 && <p class="calm">{w.noAudit}</p>}
      {entries && entries.length > 0 && (
        <Table
          columns={[w.time, w.who, [w.order, "name"], w.why, w.result]}
          rows={entries
            .slice(-mostShown)
            .reverse()
            .map((e, i) => [
              i,
              when(e.at),
              e.who,
              e.order,
              e.why,
              e.error ?? e.fleet ?? e.results?.map((r) => `${r.source}: ${r.error ?? r.after}`).join("; "),
            ])}
        />
      )}
    </>
  );
}
