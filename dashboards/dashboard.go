// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"fmt"
	"strings"
)

// A dashboard is the part of a Grafana dashboard that is used here.
type dashboard struct {
	uid, title, about string
	by                []variable
	rows              []row
}

// A variable is a choice at the top of a dashboard: the values of one label.
type variable struct{ name, label, of string }

// A row is a headline and its panels, from left to right.
type row struct {
	title  string
	height int // height of each panel, in Grafana's units
	panels []panel
}

// A panel is one picture of a dashboard.
type panel struct {
	title, about string
	width        int // width of the panel; a row is 24 wide
	kind         kind
	unit         string // the unit's name in Grafana
	queries      []query
	steps        []step // colours, each from a value on; none means one colour
	words        []word // texts for the values of a timeline
	stacked      bool
	renamed      map[string]string // fields of a table or a graph; "" leaves the field out
}

type query struct{ expr, legend string }

type step struct {
	from  float64
	color string
}

type word struct {
	value       int
	text, color string
}

// kind is a panel's plugin in Grafana.
type kind string

const (
	stat     kind = "stat"
	series   kind = "timeseries"
	timeline kind = "state-timeline" // the state of each series over time
	heat     kind = "status-history" // the value of each series over time
	table    kind = "table"
	graph    kind = "nodeGraph"
)

type object = map[string]any

var datasource = object{"type": "prometheus", "uid": "${datasource}"}

// json returns the dashboard in Grafana's import format.
func (d dashboard) json() ([]byte, error) {
	variables := []object{{
		"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Prometheus",
		"includeAll": false, "multi": false, "refresh": 1,
	}}
	for _, v := range d.by {
		variables = append(variables, object{
			"name": v.name, "type": "query", "label": v.label, "datasource": datasource,
			"query": object{"query": "label_values(" + v.of + ")", "refId": "A"}, "definition": "label_values(" + v.of + ")",
			"includeAll": true, "multi": true, "allValue": ".*", "refresh": 2, "sort": 1,
			"current": object{"text": "All", "value": "$__all"},
		})
	}
	var panels []object
	id, y := 0, 0
	for _, r := range d.rows {
		id++
		panels = append(panels, object{
			"id": id, "type": "row", "title": r.title, "collapsed": false, "panels": []object{}, "gridPos": at(0, y, 24, 1),
		})
		y++
		x := 0
		for _, p := range r.panels {
			id++
			o, err := p.object()
			if err != nil {
				return nil, fmt.Errorf("%s: %s: %w", d.title, p.title, err)
			}
			o["id"], o["gridPos"] = id, at(x, y, p.width, r.height)
			panels = append(panels, o)
			x += p.width
		}
		if x != 24 {
			return nil, fmt.Errorf("%s: %s: panels are %d wide, want 24", d.title, r.title, x)
		}
		y += r.height
	}
	text, err := json.MarshalIndent(object{
		"uid": d.uid, "title": d.title, "description": d.about, "tags": []string{"stormguard"},
		"schemaVersion": 41, "editable": true, "graphTooltip": 1, "refresh": "10s",
		"time": object{"from": "now-1h", "to": "now"}, "timezone": "browser",
		"templating": object{"list": variables}, "panels": panels,
		"links": []object{{
			"type": "dashboards", "title": "stormguard", "tags": []string{"stormguard"}, "asDropdown": true,
			"includeVars": true, "keepTime": true, "targetBlank": false, "icon": "external link", "tooltip": "", "url": "",
		}},
		"annotations": object{"list": []object{{
			"name": "breakers open", "enable": true, "iconColor": "red", "datasource": datasource,
			"expr":        `sum by (scope, cause) (increase(stormguard_breaker_transitions_total{to="open"}[1m])) > 0`,
			"titleFormat": "{{scope}} opened: {{cause}}",
		}}},
	}, "", "  ")
	return append(text, '\n'), err
}

func at(x, y, w, h int) object { return object{"x": x, "y": y, "w": w, "h": h} }

func (p panel) object() (object, error) {
	var targets []object
	for i, q := range p.queries {
		t := object{
			"refId": string(rune('A' + i)), "expr": q.expr, "datasource": datasource,
			"legendFormat": q.legend, "range": true, "instant": false,
		}
		if p.kind == table || p.kind == graph || p.kind == stat {
			t["range"], t["instant"] = false, true
		}
		if p.kind == table || p.kind == graph {
			t["format"] = "table"
		}
		if strings.Contains(q.expr, "_bucket{") {
			t["exemplar"] = true // shows traces next to the line
		}
		targets = append(targets, t)
	}
	options, custom, err := p.kind.look()
	if err != nil {
		return nil, err
	}
	if p.stacked {
		custom["stacking"] = object{"mode": "normal", "group": "A"}
		custom["fillOpacity"] = 30
	}
	field := object{"unit": p.unit, "custom": custom, "color": object{"mode": "palette-classic"}}
	if p.steps != nil {
		steps := []object{{"color": "green", "value": nil}}
		for _, s := range p.steps {
			steps = append(steps, object{"color": s.color, "value": s.from})
		}
		field["thresholds"], field["color"] = object{"mode": "absolute", "steps": steps}, object{"mode": "thresholds"}
	}
	if p.words != nil {
		values := object{}
		for _, w := range p.words {
			values[fmt.Sprint(w.value)] = object{"text": w.text, "color": w.color, "index": w.value}
		}
		field["mappings"] = []object{{"type": "value", "options": values}}
	}
	o := object{
		"type": string(p.kind), "title": p.title, "description": p.about, "datasource": datasource,
		"targets": targets, "options": options, "fieldConfig": object{"defaults": field, "overrides": []object{}},
	}
	if p.kind == heat { // Grafana paints no heat map with more points than half of the panel's pixels
		o["maxDataPoints"] = 120
	}
	if p.renamed != nil {
		rename, exclude := object{}, object{"Time": true}
		for from, to := range p.renamed {
			if to == "" {
				exclude[from] = true
			} else {
				rename[from] = to
			}
		}
		o["transformations"] = []object{{"id": "organize", "options": object{"renameByName": rename, "excludeByName": exclude}}}
	}
	return o, nil
}

// look returns the options of a plugin, and those of its fields.
func (k kind) look() (options, custom object, err error) {
	legend := object{"displayMode": "list", "placement": "bottom", "showLegend": true, "calcs": []string{}}
	tooltip := object{"mode": "multi", "sort": "desc"}
	switch k {
	case stat:
		return object{
			"colorMode": "background", "graphMode": "none", "justifyMode": "center", "textMode": "value",
			"percentChangeColorMode": "standard", "showPercentChange": false, "wideLayout": true, "orientation": "auto",
			"reduceOptions": object{"calcs": []string{"lastNotNull"}, "values": false, "fields": ""},
		}, object{}, nil
	case series:
		return object{"legend": legend, "tooltip": tooltip}, object{"lineWidth": 1, "fillOpacity": 10, "showPoints": "never", "spanNulls": false}, nil
	case timeline:
		return object{
			"legend": legend, "tooltip": tooltip, "mergeValues": true, "rowHeight": 0.9, "showValue": "auto", "alignValue": "left", "perPage": 20,
		}, object{"fillOpacity": 80, "lineWidth": 0}, nil
	case heat:
		return object{"legend": legend, "tooltip": tooltip, "rowHeight": 0.9, "showValue": "never", "colWidth": 1, "perPage": 50}, object{"fillOpacity": 80, "lineWidth": 0}, nil
	case table:
		return object{"showHeader": true, "cellHeight": "sm", "frameIndex": 0}, object{}, nil
	case graph:
		return object{"layoutAlgorithm": "layered", "edges": object{"mainStatUnit": "cps"}, "nodes": object{"mainStatUnit": "cps"}}, object{}, nil
	default:
		return nil, nil, fmt.Errorf("no kind %q", k)
	}
}
