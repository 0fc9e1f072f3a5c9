// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package main

import "strings"

// A path of the graph is the flow of messages or failures from one kind of node to another.
// expr has exactly the two labels that name the nodes.
type path struct{ expr, from, fromKind, to, toKind string }

var paths = []path{
	{
		`sum by (messaging_destination_name, messaging_consumer_group_name) (rate(messaging_client_consumed_messages_total{` + of + `}[5m]))`,
		"messaging_destination_name", "topic", "messaging_consumer_group_name", "group",
	},
	{
		`sum by (messaging_consumer_group_name, scope) (rate(stormguard_failures_total{` + of + `}[5m]))`,
		"messaging_consumer_group_name", "group", "scope", "breaker",
	},
	{
		`sum by (messaging_consumer_group_name, stormguard_dependency) (rate(stormguard_dependency_calls_total{` + of + `}[5m]))`,
		"messaging_consumer_group_name", "group", "stormguard_dependency", "dependency",
	},
}

// named copies a label into another, after a prefix that names the kind of node.
func named(expr, to, kind, from string) string {
	return `label_replace(` + expr + `, "` + to + `", "` + kind + `$1", "` + from + `", "(.*)")`
}

// edges returns the query for all paths in one table.
func edges() string {
	var all []string
	for _, p := range paths {
		e := named(p.expr, "source", p.fromKind+":", p.from)
		e = named(e, "target", p.toKind+":", p.to)
		e = `label_join(` + e + `, "id", " ", "source", "target")`
		all = append(all, `sum by (id, source, target) (`+e+`)`)
	}
	return strings.Join(all, "\nor ")
}

// nodes returns the query for all nodes at which a path begins or ends, with their rates.
func nodes() string {
	var all []string
	seen := map[string]bool{}
	add := func(expr, label, kind string) {
		if seen[kind] {
			return
		}
		seen[kind] = true
		e := named(`sum by (`+label+`) (`+expr+`)`, "id", kind+":", label)
		e = named(e, "title", "", label)
		e = `label_replace(` + e + `, "subtitle", "` + kind + `", "", "")`
		all = append(all, `sum by (id, title, subtitle) (`+e+`)`)
	}
	for _, p := range paths {
		add(p.expr, p.from, p.fromKind)
		add(p.expr, p.to, p.toKind)
	}
	return strings.Join(all, "\nor ")
}

var topology = dashboard{
	uid: "stormguard-topology", title: "stormguard: topology",
	about: "Topics and queues, the groups that read them, their breakers, and the dependencies that their handlers name by guard.Calls. Producers are in traces: a metric does not know them.",
	by:    []variable{groupVariable, topicVariable},
	rows: []row{
		{"Who reads what, what it calls, and what fails", 18, []panel{
			{title: "Topology", about: "Beside a topic and a group: messages a second. Beside a breaker: failed handler calls a second. Beside a dependency: its calls a second.", width: 24, kind: graph, unit: "cps",
				queries: []query{{nodes(), ""}, {edges(), ""}},
				renamed: map[string]string{"Value #A": "mainstat", "Value #B": "mainstat"}},
		}},
		{"The same as tables", 9, []panel{
			{title: "Topic and group", width: 8, kind: table, unit: "cps",
				queries: []query{{paths[0].expr, ""}},
				renamed: map[string]string{"messaging_destination_name": "topic", "messaging_consumer_group_name": "group", "Value": "consumed"}},
			{title: "Group and breaker", width: 8, kind: table, unit: "cps",
				queries: []query{{paths[1].expr, ""}},
				renamed: map[string]string{"messaging_consumer_group_name": "group", "Value": "failed calls"}},
			{title: "Group and dependency", width: 8, kind: table, unit: "cps",
				queries: []query{{paths[2].expr, ""}},
				renamed: map[string]string{"messaging_consumer_group_name": "group", "stormguard_dependency": "dependency", "Value": "calls"}},
		}},
	},
}
