// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package main

var deadLetters = dashboard{
	uid: "stormguard-dlq", title: "stormguard: dead letters and recovery",
	about: "What died and why, what is left of the budget, and how soon a failed message succeeds.",
	by:    []variable{groupVariable, topicVariable},
	rows: []row{
		{"Dead letters", 8, []panel{
			{title: "By reason", about: "docs/operating.md has the reasons.", width: 12, kind: series, unit: "none", stacked: true,
				queries: []query{{`sum by (reason) (increase(stormguard_dead_letters_total{` + of + `}[$__rate_interval]))`, "{{reason}}"}}},
			{title: "Share of failed messages that died", width: 6, kind: series, unit: "percentunit",
				queries: []query{{`max by (messaging_destination_name) (stormguard_dlq_ratio{` + of + `})`, "{{messaging_destination_name}}"}}},
			{title: "Quarantined", about: "Messages that matched a rule.", width: 6, kind: series, unit: "none",
				queries: []query{{`sum by (messaging_destination_name) (increase(stormguard_quarantined_total{` + of + `}[$__rate_interval]))`, "{{messaging_destination_name}}"}}},
		}},
		{"Budget and writer", 8, []panel{
			{title: "Credits left", about: "At 0, messages without a proof wait.", width: 8, kind: series, unit: "none",
				queries: []query{{`min by (messaging_destination_name) (stormguard_budget_balance{` + of + `})`, "{{messaging_destination_name}}"}}},
			{title: "Writes, by outcome", width: 8, kind: series, unit: "cps", stacked: true,
				queries: []query{{`sum by (outcome) (rate(stormguard_dlq_write_duration_seconds_count{` + of + `}[$__rate_interval]))`, "{{outcome}}"}}},
			{title: "Mean duration of a write", width: 8, kind: series, unit: "s",
				queries: []query{{`sum by (messaging_destination_name) (rate(stormguard_dlq_write_duration_seconds_sum{` + of + `}[$__rate_interval])) / sum by (messaging_destination_name) (rate(stormguard_dlq_write_duration_seconds_count{` + of + `}[$__rate_interval]))`, "{{messaging_destination_name}}"}}},
		}},
		{"Recovery", 8, []panel{
			{title: "From a message's first failure to its ack", width: 8, kind: series, unit: "s",
				queries: []query{quantile("50", "stormguard_recovery_duration_seconds"), quantile("99", "stormguard_recovery_duration_seconds")}},
			{title: "Storms that began", width: 8, kind: series, unit: "none",
				queries: []query{{`sum by (messaging_destination_name) (increase(stormguard_storms_total{` + of + `}[$__rate_interval]))`, "{{messaging_destination_name}}"}}},
			{title: "Breakers that opened, by cause", width: 8, kind: series, unit: "none",
				queries: []query{{`sum by (scope, cause) (increase(stormguard_breaker_transitions_total{to="open", scope=~"($group)(/.*)?"}[$__rate_interval]))`, "{{scope}} {{cause}}"}}},
		}},
		{"Retry topics", 7, []panel{
			{title: "Parked now", about: "Only with Kafka's retry topics.", width: 12, kind: series, unit: "none",
				queries: []query{{`sum by (messaging_destination_name) (stormguard_parked{` + of + `})`, "{{messaging_destination_name}}"}}},
			{title: "Parked, and sent after them", width: 12, kind: series, unit: "cps", queries: []query{
				{`sum by (messaging_destination_name) (rate(stormguard_parked_total{` + of + `}[$__rate_interval]))`, "parked {{messaging_destination_name}}"},
				{`sum by (messaging_destination_name) (rate(stormguard_followed_total{` + of + `}[$__rate_interval]))`, "followed {{messaging_destination_name}}"},
			}},
		}},
	},
}
