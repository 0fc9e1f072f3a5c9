// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package main

const at1 = `instance=~"$instance"`

var fleetAndLimits = dashboard{
	uid: "stormguard-fleet", title: "stormguard: fleet and limits",
	about: "Who is heard, whether the fleet can decide, and what each limit admits.",
	by:    []variable{{"instance", "Process", "stormguard_limiter_keys, instance"}},
	rows: []row{
		{"Now", 4, []panel{
			{title: "Processes", width: 4, kind: stat, unit: "none",
				queries: []query{{`count(stormguard_limiter_keys{` + at1 + `})`, ""}}},
			{title: "Without quorum", about: "Processes that hear fewer than a quorum.", width: 4, kind: stat, unit: "none", steps: anyIsBad,
				queries: []query{{`count(stormguard_fleet_heard{` + at1 + `} < stormguard_fleet_quorum{` + at1 + `}) or vector(0)`, ""}}},
			{title: "Register away", about: "Processes that cannot reach the register of the configuration.", width: 4, kind: stat, unit: "none", steps: anyIsBad,
				queries: []query{{`sum(stormguard_fleet_register_away{` + at1 + `})`, ""}}},
			{title: "Nobody mints", about: "The share of the limits that belongs to processes which are not heard.", width: 4, kind: stat, unit: "percentunit", steps: []step{{0.001, "red"}},
				queries: []query{{`max(stormguard_limiter_share_stranded_ratio{` + at1 + `})`, ""}}},
			{title: "Skew", about: "How unevenly tokens lie: 0 is even, 0.5 the most.", width: 4, kind: stat, unit: "none", steps: []step{{0.2, "orange"}, {0.3, "red"}},
				queries: []query{{`max(stormguard_limiter_skew_ratio{` + at1 + `})`, ""}}},
			{title: "Storms of the fleet", width: 4, kind: stat, unit: "none", steps: anyIsBad,
				queries: []query{{`count(max by (messaging_consumer_group_name, messaging_destination_name) (stormguard_fleet_storm{` + at1 + `}) == 1) or vector(0)`, ""}}},
		}},
		{"Members", 8, []panel{
			{title: "Silence of a peer", about: "Silent from 1 s on, lost from 10 s on. The worst that any process sees.", width: 12, kind: heat, unit: "s",
				steps:   []step{{1, "yellow"}, {10, "red"}},
				queries: []query{{`max by (peer) (max_over_time(stormguard_fleet_silence_seconds{` + at1 + `}[$__rate_interval]))`, "{{peer}}"}}},
			{title: "What the fleet makes of breakers", width: 12, kind: timeline, unit: "none",
				words: []word{{0, "closed", "green"}, {1, "probing", "yellow"}, {2, "open", "red"}},
				queries: []query{{`max by (scope) (
  2 * stormguard_fleet_scope{` + at1 + `, state="open"} or stormguard_fleet_scope{` + at1 + `, state="probing"} or 0 * stormguard_fleet_scope{` + at1 + `, state="closed"}
)`, "{{scope}}"}}},
		}},
		{"Limits", 8, []panel{
			{title: "Admitted, by key", width: 8, kind: series, unit: "cps",
				queries: []query{{`sum by (key) (rate(stormguard_limiter_admitted_total{` + at1 + `}[$__rate_interval]))`, "{{key}}"}}},
			{title: "Denied, by key", width: 8, kind: series, unit: "cps",
				queries: []query{{`sum by (key) (rate(stormguard_limiter_denied_total{` + at1 + `}[$__rate_interval]))`, "{{key}}"}}},
			{title: "Tokens", about: "level: own; lent to others; held: borrowed; pinned: lent to a process that is not heard.", width: 8, kind: series, unit: "none",
				queries: []query{{`sum by (state) (stormguard_limiter_tokens{` + at1 + `})`, "{{state}}"}}},
		}},
		{"Configuration", 8, []panel{
			{title: "Number", about: "Equal in all processes when a change is through.", width: 8, kind: series, unit: "none",
				queries: []query{{`max by (instance, which) (stormguard_fleet_configuration{` + at1 + `})`, "{{instance}} {{which}}"}}},
			{title: "Members that have not applied a cut", width: 8, kind: series, unit: "none",
				queries: []query{{`max(stormguard_fleet_configuration_lacking{` + at1 + `})`, "lacking"}}},
			{title: "Share of each process", width: 8, kind: series, unit: "percentunit",
				queries: []query{{`stormguard_limiter_share_ratio{` + at1 + `}`, "{{instance}}"}}},
		}},
		{"Gossip", 8, []panel{
			{title: "Delay of a change", about: "The longest from a change to its acknowledgement.", width: 6, kind: series, unit: "s",
				queries: []query{{`max by (instance) (stormguard_fleet_sync_delay_seconds{` + at1 + `})`, "{{instance}}"}}},
			{title: "Packets", width: 6, kind: series, unit: "cps",
				queries: []query{{`sum by (direction) (rate(stormguard_fleet_packets_total{` + at1 + `}[$__rate_interval]))`, "{{direction}}"}}},
			{title: "Refused", about: "Packets and deltas, by reason.", width: 6, kind: series, unit: "cps",
				queries: []query{{`sum by (section, reason) (rate(stormguard_fleet_refused_total{` + at1 + `}[$__rate_interval]))`, "{{section}} {{reason}}"}}},
			{title: "Clocks", about: "A peer's wall clock less ours.", width: 6, kind: series, unit: "s",
				queries: []query{{`max by (peer) (stormguard_fleet_clock_offset_seconds{` + at1 + `})`, "{{peer}}"}}},
		}},
	},
}
