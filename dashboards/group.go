// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package main

// quantile returns the query for a quantile of a histogram, over the chosen variables.
func quantile(q, metric string) query {
	return query{
		`histogram_quantile(0.` + q + `, sum by (le, messaging_destination_name) (rate(` + metric + `_bucket{` + of + `}[$__rate_interval])))`,
		"p" + q + " {{messaging_destination_name}}",
	}
}

var group = dashboard{
	uid: "stormguard-group", title: "stormguard: one consumer group",
	about: "The sources of a group: what came in, what became of it, and what it waits for.",
	by:    []variable{groupVariable, topicVariable},
	rows: []row{
		{"Messages", 8, []panel{
			{title: "In and out", width: 12, kind: series, unit: "cps", queries: []query{
				{`sum(rate(messaging_client_consumed_messages_total{` + of + `}[$__rate_interval]))`, "consumed"},
				{`sum(rate(stormguard_handled_total{` + of + `}[$__rate_interval]))`, "handled"},
				{`sum(rate(stormguard_returned_total{` + of + `}[$__rate_interval]))`, "returned"},
				{`sum(rate(stormguard_dead_letters_total{` + of + `}[$__rate_interval]))`, "dead-lettered"},
			}},
			{title: "Window in use", about: "1 is a full window: intake stops until something is settled. 0 while messages go to the disk.", width: 6, kind: series, unit: "percentunit",
				queries: []query{{`max by (` + bySource + `) (stormguard_window_used_ratio{` + of + `})`, sourceName}}},
			{title: "Lag", about: "Messages behind at the broker: Kafka and JetStream. With JetStream's WrapConsumer it stands still in an outage.", width: 6, kind: series, unit: "none",
				queries: []query{{`max by (` + bySource + `) (stormguard_lag{` + of + `})`, sourceName}}},
		}},
		{"Sources", 8, []panel{
			{title: "Why it is held", width: 12, kind: timeline, unit: "none", words: reasons, queries: []query{{whyHeld, sourceName}}},
			{title: "Breaker", width: 12, kind: timeline, unit: "none",
				words: []word{{0, "closed", "green"}, {1, "half-open", "yellow"}, {2, "open", "red"}},
				queries: []query{{`max by (` + bySource + `) (
  2 * stormguard_breaker_state{` + of + `, state="open"} or stormguard_breaker_state{` + of + `, state="half-open"} or 0 * stormguard_breaker_state{` + of + `, state="closed"}
)`, sourceName}}},
		}},
		{"Calls", 8, []panel{
			{title: "Duration of successful calls", about: "One message in 64 is timed: its count is no rate.", width: 8, kind: series, unit: "s",
				queries: []query{quantile("50", "stormguard_process_duration_sampled_seconds"), quantile("99", "stormguard_process_duration_sampled_seconds")}},
			{title: "Failed calls, by whose fault", width: 8, kind: series, unit: "cps", stacked: true,
				queries: []query{{`sum by (error_type) (rate(stormguard_failures_total{` + of + `}[$__rate_interval]))`, "{{error_type}}"}}},
			{title: "Retries", about: "Handler calls after a message's first.", width: 8, kind: series, unit: "cps",
				queries: []query{{`sum by (messaging_destination_name) (rate(stormguard_retries_total{` + of + `}[$__rate_interval]))`, "{{messaging_destination_name}}"}}},
		}},
		{"Rare", 7, []panel{
			{title: "Failed acks", about: "Handled messages that will be handled again.", width: 8, kind: series, unit: "none",
				queries: []query{{`sum by (messaging_destination_name) (increase(stormguard_ack_failures_total{` + of + `}[$__rate_interval]))`, "{{messaging_destination_name}}"}}},
			{title: "Overtaken", about: "Messages that were handled before those in front of them, to prove that the dependency is up.", width: 8, kind: series, unit: "none",
				queries: []query{{`sum by (messaging_destination_name) (increase(stormguard_overtaken_total{` + of + `}[$__rate_interval]))`, "{{messaging_destination_name}}"}}},
			{title: "On the disk", about: "Sources with Policy.Spill.", width: 8, kind: series, unit: "none",
				queries: []query{{`sum by (` + bySource + `) (stormguard_spilled{` + of + `})`, sourceName}}},
		}},
	},
}
