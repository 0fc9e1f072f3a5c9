// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package main

// of selects the labels that the variables choose.
const of = `messaging_consumer_group_name=~"$group", messaging_destination_name=~"$topic"`

var (
	groupVariable = variable{"group", "Group", "stormguard_handled_total, messaging_consumer_group_name"}
	topicVariable = variable{"topic", "Topic or queue", `stormguard_handled_total{messaging_consumer_group_name=~"$group"}, messaging_destination_name`}
)

var (
	anyIsBad = []step{{1, "red"}}
	ages     = []step{{1, "#9fbf3b"}, {10, "yellow"}, {60, "orange"}, {600, "red"}}
)

// A source belongs to a group: two groups may read one topic.
const (
	bySource   = `messaging_consumer_group_name, stormguard_source`
	sourceName = "{{messaging_consumer_group_name}} {{stormguard_source}}"
)

// whyHeld is one number for each source: its strongest reason to hold.
const whyHeld = `max by (` + bySource + `) (
  1 * stormguard_hold_active{` + of + `, reason="backpressure"}
  or 2 * stormguard_hold_active{` + of + `, reason="limiter"}
  or 3 * stormguard_hold_active{` + of + `, reason="operator"}
  or 4 * stormguard_hold_active{` + of + `, reason="breaker"}
  or 5 * stormguard_hold_active{` + of + `, reason="storm"}
  or 6 * stormguard_hold_active{` + of + `, reason="dlq"}
)`

var reasons = []word{
	{0, "running", "green"}, {1, "backpressure", "blue"}, {2, "limiter", "light-blue"}, {3, "operator", "purple"},
	{4, "breaker", "orange"}, {5, "storm", "red"}, {6, "dlq", "dark-red"},
}

var overview = dashboard{
	uid: "stormguard-overview", title: "stormguard: storm overview",
	about: "What is held, where, and why. Begin here.",
	by:    []variable{groupVariable, topicVariable},
	rows: []row{
		{"Now", 4, []panel{
			{title: "Sources", about: "Open sources.", width: 4, kind: stat, unit: "none",
				queries: []query{{`count(stormguard_window_used_ratio{` + of + `})`, ""}}},
			{title: "Held", about: "Sources that are not simply running.", width: 4, kind: stat, unit: "none", steps: []step{{1, "orange"}},
				queries: []query{{`count(max by (instance, ` + bySource + `) (stormguard_hold_active{` + of + `}) == 1) or vector(0)`, ""}}},
			{title: "In storm", about: "Topics and queues whose error rate, attempts and age are over their thresholds.", width: 4, kind: stat, unit: "none", steps: anyIsBad,
				queries: []query{{`count(max by (messaging_consumer_group_name, messaging_destination_name) (stormguard_hold_active{` + of + `, reason="storm"}) == 1) or vector(0)`, ""}}},
			{title: "Breakers not closed", about: "Scopes whose breaker is open or probes.", width: 4, kind: stat, unit: "none", steps: anyIsBad,
				queries: []query{{`count(max by (scope) (stormguard_breaker_state{` + of + `, state!="closed"}) == 1) or vector(0)`, ""}}},
			{title: "Wait for a person", about: "Sources whose messages wait for a DLQ credit or for the dead-letter writer.", width: 4, kind: stat, unit: "none", steps: anyIsBad,
				queries: []query{{`count(stormguard_hold_active{` + of + `, reason="dlq"} == 1) or vector(0)`, ""}}},
			{title: "Dead letters, 15 min", width: 4, kind: stat, unit: "none", steps: []step{{1, "orange"}, {20, "red"}},
				queries: []query{{`round(sum(increase(stormguard_dead_letters_total{` + of + `}[15m])))`, ""}}},
		}},
		{"Sources over time", 9, []panel{
			{title: "Age of the oldest message", about: "One line for each partition or queue of a group. A storm is a red block.", width: 12, kind: heat, unit: "s", steps: ages,
				queries: []query{{`max by (` + bySource + `) (max_over_time(stormguard_hold_age_seconds{` + of + `}[$__rate_interval]))`, sourceName}}},
			{title: "Why it is held", about: "The strongest reason.", width: 12, kind: timeline, unit: "none", words: reasons,
				queries: []query{{whyHeld, sourceName}}},
		}},
		{"Flow", 8, []panel{
			{title: "Handled", width: 8, kind: series, unit: "cps",
				queries: []query{{`sum by (messaging_destination_name) (rate(stormguard_handled_total{` + of + `}[$__rate_interval]))`, "{{messaging_destination_name}}"}}},
			{title: "Failed calls, by whose fault", width: 8, kind: series, unit: "cps", stacked: true,
				queries: []query{{`sum by (error_type) (rate(stormguard_failures_total{` + of + `}[$__rate_interval]))`, "{{error_type}}"}}},
			{title: "Unsettled messages", width: 8, kind: series, unit: "none", stacked: true,
				queries: []query{{`sum by (state) (stormguard_messages{` + of + `})`, "{{state}}"}}},
		}},
		{"Held now", 8, []panel{
			{title: "Sources", about: "What docs/runbook.md calls the scope of an incident.", width: 12, kind: table, unit: "none",
				queries: []query{{`max by (instance, messaging_consumer_group_name, stormguard_source, reason) (stormguard_hold_active{` + of + `} == 1)`, ""}},
				renamed: map[string]string{"messaging_consumer_group_name": "group", "stormguard_source": "source", "Value": ""}},
			{title: "Breakers", width: 12, kind: table, unit: "none",
				queries: []query{{`count by (scope, state) (stormguard_breaker_state{` + of + `, state!="closed"} == 1)`, ""}},
				renamed: map[string]string{"Value": "sources"}},
		}},
	},
}
