// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"fmt"
	"strings"

	"go.yaml.in/yaml/v3"
)

// pages is the address of the docs to which alerts link.
const pages = "https://github.com/stormguard-mq/stormguard/blob/main/docs/"

// A severity says how soon a person must react.
type severity string

const (
	page   severity = "page"   // now
	ticket severity = "ticket" // in office hours
)

// An alert is one rule, its entry in the docs, and its test.
type alert struct {
	name     string
	severity severity
	expr     string
	lasts    string // how long expr must be true; "" fires at once
	summary  string // template for Prometheus
	means    string // what the alert means, for docs: one or two sentences
	do       string // what to do, for docs

	tests []sample
}

// A sample is a series in an alert's test, with one value a minute: bad while something is
// wrong, good while all is well. A value is a number, or number+step. If good is "", the
// series keeps the last value of bad, as a counter does.
type sample struct{ series, bad, good string }

// byTopic are the labels of an alert about messages.
const byTopic = `messaging_consumer_group_name, messaging_destination_name`

const where = "{{ $labels.messaging_consumer_group_name }} on {{ $labels.messaging_destination_name }}"

// labelled returns a series of a source's metric, for a test.
func labelled(metric, more string) string {
	if more != "" {
		more = ", " + more
	}
	return metric + `{instance="a", stormguard_source="orders/0", messaging_consumer_group_name="billing", messaging_destination_name="orders"` + more + `}`
}

var alerts = []alert{
	{
		name: "StormguardStorm", severity: page,
		expr: `max by (` + byTopic + `) (stormguard_hold_active{reason="storm"}) == 1
or sum by (` + byTopic + `) (increase(stormguard_storms_total[5m])) > 0`,
		summary: "Storm: " + where,
		means:   "An outage. The source holds its messages, and dead-letters only permanent failures, proven poison and rare guesses.",
		do:      "Follow the runbook.",
		tests:   []sample{{labelled("stormguard_hold_active", `reason="storm"`), "1", "0"}},
	},
	{
		name: "StormguardBreakerOpen", severity: page, lasts: "5m",
		expr:    `max by (messaging_consumer_group_name, scope) (stormguard_breaker_state{state!="closed"}) == 1`,
		summary: "Breaker not closed for 5 min: {{ $labels.scope }}",
		means:   "Calls of the scope fail, or a person forced its breaker open. Messages wait until probes succeed.",
		do:      "The log line `breaker opened` has the error, `stormguard breaker list` the cause and any force. Mend the dependency. If it works, go to the runbook's step 4.",
		tests: []sample{
			{labelled("stormguard_breaker_state", `scope="billing/orders/*", state="open"`), "1", "0"},
			{labelled("stormguard_breaker_state", `scope="billing/orders/*", state="half-open"`), "0", "0"},
		},
	},
	{
		name: "StormguardMessagesWaitForPerson", severity: page, lasts: "2m",
		expr:    `max by (` + byTopic + `) (stormguard_hold_active{reason="dlq"}) == 1`,
		summary: "Messages wait for a DLQ credit or the dead-letter writer: " + where,
		means:   "Failed messages cannot be dead-lettered: no credit, no writer, a limit, or a DLQ that is away.",
		do:      "`stormguard source show` says which. The runbook's step 1 says what to do.",
		tests:   []sample{{labelled("stormguard_hold_active", `reason="dlq"`), "1", "0"}},
	},
	{
		name: "StormguardBudgetSpent", severity: ticket, lasts: "5m",
		expr:    `min by (` + byTopic + `) (stormguard_budget_balance) < 1`,
		summary: "No DLQ credit left: " + where,
		means:   "Failed messages that nothing proves to be poison wait for credits.",
		do:      "Quarantine what the dead letters share (`stormguard causes`).",
		tests:   []sample{{labelled("stormguard_budget_balance", ""), "0.2", "20"}},
	},
	{
		name: "StormguardDeadLetterWriterDown", severity: page, lasts: "2m",
		expr: `sum by (` + byTopic + `) (increase(stormguard_dlq_write_duration_seconds_count{outcome="failed"}[5m])) > 0
unless sum by (` + byTopic + `) (increase(stormguard_dlq_write_duration_seconds_count{outcome="confirmed"}[5m])) > 0`,
		summary: "Writes of dead letters fail, and none succeeds: " + where,
		means:   "In 5 min no dead letter of the topic was written, and one or more failed. It may be one source of many whose DLQ fails. Nothing is lost: the messages wait.",
		do:      "Mend the DLQ. The log line `dead-letter writer fails` has the source and the error.",
		tests: []sample{
			{labelled("stormguard_dlq_write_duration_seconds_count", `outcome="failed"`), "0+6", ""},
			{labelled("stormguard_dlq_write_duration_seconds_count", `outcome="confirmed"`), "3", "3+1"},
		},
	},
	{
		name: "StormguardDeadLetters", severity: ticket,
		expr:    `sum by (` + byTopic + `) (increase(stormguard_dead_letters_total{reason!="quarantine"}[10m])) > 20`,
		summary: "Over 20 dead letters in 10 min: " + where,
		means:   "A producer sends poison, or a handler has a mistake.",
		do:      "Quarantine what they share (`stormguard causes`), or mend the handler.",
		tests:   []sample{{labelled("stormguard_dead_letters_total", `reason="attempts"`), "0+5", ""}},
	},
	{
		name: "StormguardHoldNearlyFull", severity: ticket, lasts: "5m",
		expr:    `max by (` + byTopic + `) (stormguard_window_used_ratio) > 0.9`,
		summary: "The window is nearly full: " + where,
		means:   "When the window is full, the rest waits at the broker. In an outage that is right.",
		do:      "In an outage, check that the broker keeps messages for longer than it lasts. If nothing is held, a handler is slow or hangs: see the duration of calls on the group's dashboard.",
		tests: []sample{
			{labelled("stormguard_window_used_ratio", ""), "0.98", "0.01"},
		},
	},
	{
		name: "StormguardOldMessage", severity: page, lasts: "5m",
		expr:    `max by (` + byTopic + `) (stormguard_hold_age_seconds) > 900`,
		summary: "A message has waited for 15 min: " + where,
		means:   "Its order is blocked: by an outage, a message that fails alone, or a handler that never returns.",
		do:      "`stormguard source show` says why, and a WARN line has `help`.",
		tests:   []sample{{labelled("stormguard_hold_age_seconds", ""), "1200", "2"}},
	},
	{
		name: "StormguardLagRisesWhileHeld", severity: ticket, lasts: "15m",
		expr: `sum by (` + byTopic + `) (deriv(stormguard_lag[15m])) > 0
and max by (` + byTopic + `) (stormguard_hold_active{reason=~"breaker|storm|dlq|operator"}) == 1`,
		summary: "The group falls behind while it is held: " + where,
		means:   "Ever more messages wait at the broker. The alert works for Kafka, and for JetStream with Consume.",
		do:      "Raise the broker's retention above the age of the oldest message (`stormguard source show`): what the broker deletes is lost.",
		tests: []sample{
			{labelled("stormguard_lag", ""), "0+600", "0"},
			{labelled("stormguard_hold_active", `reason="breaker"`), "1", "0"},
		},
	},
	{
		name: "StormguardAckFailures", severity: ticket,
		expr:    `sum by (` + byTopic + `) (increase(stormguard_ack_failures_total[10m])) > 0`,
		summary: "Acks fail: " + where,
		means:   "Handled messages will be handled again. On Kafka commits are behind.",
		do:      "Look at the broker and the connection.",
		tests:   []sample{{labelled("stormguard_ack_failures_total", ""), "0+1", ""}},
	},
	{
		name: "StormguardFleetBelowQuorum", severity: page, lasts: "1m",
		expr:    `stormguard_fleet_heard < stormguard_fleet_quorum`,
		summary: "{{ $labels.instance }} hears {{ $value }} processes, fewer than a quorum",
		means:   "The process takes no part in the fleet's decisions. Its breakers work on; so does its share of the limits, unless OnSilence is majority.",
		do:      "Look at the network. `stormguard fleet` shows who is heard. Evict members that will not come back (`stormguard fleet evict`).",
		tests: []sample{
			{`stormguard_fleet_heard{instance="a"}`, "1", "3"},
			{`stormguard_fleet_quorum{instance="a"}`, "2", "2"},
		},
	},
	{
		name: "StormguardRegisterAway", severity: ticket, lasts: "10m",
		expr:    `stormguard_fleet_register_away == 1`,
		summary: "{{ $labels.instance }} cannot reach the register",
		means:   "The configuration cannot change; the newest stays in force.",
		do:      "Mend the register's store.",
		tests:   []sample{{`stormguard_fleet_register_away{instance="a"}`, "1", "0"}},
	},
	{
		name: "StormguardLimitStranded", severity: ticket, lasts: "10m",
		expr:    `max(stormguard_limiter_share_stranded_ratio) > 0`,
		summary: "{{ $value | humanizePercentage }} of the limits is minted by nobody",
		means:   "A member is away, and its share unused, unless OnSilence is takeover.",
		do:      "Start it again, or `stormguard fleet evict` it.",
		tests:   []sample{{`stormguard_limiter_share_stranded_ratio{instance="a"}`, "0.33", "0"}},
	},
	{
		name: "StormguardLimitSkewed", severity: ticket, lasts: "15m",
		expr:    `max(stormguard_limiter_skew_ratio) > 0.3`,
		summary: "Tokens lie unevenly: {{ $value }}",
		means:   "Some processes have tokens to spare, others none. If processes hear each other, loans even that out in a second.",
		do:      "Look at the sync delay and refused packets.",
		tests:   []sample{{`stormguard_limiter_skew_ratio{instance="a"}`, "0.45", "0.1"}},
	},
	{
		name: "StormguardCutNotApplied", severity: ticket, lasts: "5m",
		expr:    `max(stormguard_fleet_configuration_lacking) > 0`,
		summary: "{{ $value }} members have not applied a smaller limit",
		means:   "A member has not confirmed its smaller share. Until then the others wait for their larger ones.",
		do:      "`stormguard fleet` names it. Start it again, or evict it.",
		tests:   []sample{{`stormguard_fleet_configuration_lacking{instance="a"}`, "1", "0"}},
	},
	{
		name: "StormguardForeignPackets", severity: ticket,
		expr:    `sum by (instance) (increase(stormguard_fleet_refused_total{reason="unauthenticated"}[10m])) > 0`,
		summary: "{{ $labels.instance }} refuses packets without the fleet's key",
		means:   "A process has an old key, or a stranger sends packets.",
		do:      "Compare the processes' keys. If all are equal, find the sender.",
		tests:   []sample{{`stormguard_fleet_refused_total{instance="a", section="", reason="unauthenticated"}`, "0+5", ""}},
	},
	{
		name: "StormguardClockWrong", severity: ticket, lasts: "2m",
		expr: `max by (peer) (
  stormguard_fleet_clock_offset_seconds > 0.5 and increase(stormguard_fleet_clock_violations_total[10m]) > 0
)`,
		summary: "The clock of {{ $labels.peer }} is {{ $value }} s ahead",
		means:   "The process's clock is over 0.5 s ahead, for which the others cannot correct: its changes win against theirs. If it fires for all peers of one process, that one's clock is behind.",
		do:      "Mend that host's time synchronisation.",
		tests: []sample{
			{`stormguard_fleet_clock_offset_seconds{instance="a", peer="b"}`, "3600", "0"},
			{`stormguard_fleet_clock_violations_total{instance="a", peer="b"}`, "0+5", "0+5"}, // counts also before the offset is known
		},
	},
}

// ruleFile is the file for Prometheus.
type ruleFile struct {
	Groups []ruleGroup `yaml:"groups"`
}

type ruleGroup struct {
	Name  string `yaml:"name"`
	Rules []rule `yaml:"rules"`
}

type rule struct {
	Alert       string            `yaml:"alert"`
	Expr        string            `yaml:"expr"`
	For         string            `yaml:"for,omitempty"`
	Labels      map[string]string `yaml:"labels"`
	Annotations map[string]string `yaml:"annotations"`
}

// annotations returns the alert's texts, which are no labels.
func (a alert) annotations() map[string]string {
	return map[string]string{
		"summary": a.summary, "description": a.means, "action": strings.ReplaceAll(a.do, "`", "'"),
		"runbook_url": pages + "alerts.md#" + strings.ToLower(a.name),
	}
}

func rulesFile() ([]byte, error) {
	g := ruleGroup{Name: "stormguard"}
	for _, a := range alerts {
		g.Rules = append(g.Rules, rule{a.name, a.expr, a.lasts, map[string]string{"severity": string(a.severity)}, a.annotations()})
	}
	var b bytes.Buffer
	b.WriteString("# Written by `go run .` in dashboards. docs/alerts.md explains each alert.\n")
	e := yaml.NewEncoder(&b)
	e.SetIndent(2)
	err := e.Encode(ruleFile{[]ruleGroup{g}})
	return b.Bytes(), err
}

// alertsPage returns the page of docs to which the alerts link.
func alertsPage() []byte {
	var b bytes.Buffer
	b.WriteString(`# Alerts

What each alert of [stormguard.rules.yml](../dashboards/prometheus/stormguard.rules.yml) means, and
what to do. [The runbook](runbook.md) leads through an incident.

| alert | severity | after |
|---|---|---|
`)
	for _, a := range alerts {
		lasts := a.lasts
		if lasts == "" {
			lasts = "at once"
		}
		fmt.Fprintf(&b, "| [%s](#%s) | %s | %s |\n", a.name, strings.ToLower(a.name), a.severity, lasts)
	}
	b.WriteString("\n`page` means now; `ticket` can wait for office hours.\n")
	for _, a := range alerts {
		fmt.Fprintf(&b, "\n## %s\n\n%s\n\n%s\n\n```\n%s\n```\n", a.name, wrap(a.means), wrap("**Do:** "+a.do), a.expr)
	}
	return b.Bytes()
}

// wrap breaks a text into lines of at most 100 bytes.
func wrap(text string) string {
	var b strings.Builder
	n := 0
	for word := range strings.FieldsSeq(text) {
		switch {
		case n == 0:
		case n+1+len(word) > 100:
			b.WriteByte('\n')
			n = 0
		default:
			b.WriteByte(' ')
			n++
		}
		b.WriteString(word)
		n += len(word)
	}
	return b.String()
}
