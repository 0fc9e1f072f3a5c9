// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package console

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/stormguard-mq/stormguard/dlq"
	"github.com/stormguard-mq/stormguard/internal/operator"
)

// A Rule is a rule of the quarantine. It is in force until Until.
type Rule struct {
	Rule  string    `json:"rule"`
	By    string    `json:"by,omitempty"`
	Why   string    `json:"why,omitempty"`
	At    time.Time `json:"at"`
	Until time.Time `json:"until"`
}

// rules returns the rules of the guards' lists, each once: guards of one process may share
// a list.
func (c *Console) rules() []Rule {
	all := []Rule{}
	seen := make(map[Rule]bool)
	for _, q := range c.lists() {
		for _, e := range q.Entries() {
			r := Rule{e.Rule.String(), e.By, e.Why, e.At.UTC(), e.Until.UTC()}
			if !seen[r] {
				seen[r] = true
				all = append(all, r)
			}
		}
	}
	return all
}

// lists returns the guards' lists. Guards may share a list: the same change twice is
// harmless.
func (c *Console) lists() (all []dlq.Quarantine) {
	for _, g := range c.guards {
		if q := g.Quarantine(); q != nil {
			all = append(all, q)
		}
	}
	return all
}

// A RuleChange adds a rule to the quarantine list, or removes it. If the list is the
// fleet's, the change reaches all processes. An answer with status 502 names the processes
// of [Config.Fleet] in which the change is not in force within five seconds.
type RuleChange struct {
	Rule   string        `json:"rule"`             // in the format of dlq.ParseRule
	Remove bool          `json:"remove,omitempty"` // remove the rule instead of adding it
	For    time.Duration `json:"for_ns,omitempty"` // duration of a new rule; 0 means 24 h
	By     string        `json:"by,omitempty"`     // who changes the rule; a token's name replaces it
	Why    string        `json:"why,omitempty"`
}

// addRule and removeRule ask the processes of a fleet whether the rule in Order.Sources is
// on the guards' lists, or not on them. The rule itself travels with the fleet's list.
const (
	addRule    = "quarantine add"
	removeRule = "quarantine remove"
)

func (r RuleChange) String() string { return r.order().String() }

func (r RuleChange) order() Order {
	if r.Remove {
		return Order{Action: removeRule, Sources: []string{r.Rule}}
	}
	return Order{Action: addRule, Sources: []string{r.Rule}}
}

// changeRules changes the lists and writes the audit.
func (c *Console) changeRules(w http.ResponseWriter, r *http.Request) {
	var in RuleChange
	d := json.NewDecoder(http.MaxBytesReader(w, r.Body, maxBody))
	d.DisallowUnknownFields()
	err := d.Decode(&in)
	if err == nil && d.More() {
		err = errors.New("want one object")
	}
	who, _ := operator.From(r.Context())
	if err == nil {
		if in.By == "" || who.Token != "" {
			in.By = who.Token
		}
		err = c.changeRule(in)
	}
	status := http.StatusBadRequest
	if err != nil {
		err = fmt.Errorf("%w: %w", errOrder, err)
	} else if err = c.confirm(r.Context(), in, who.String()); err != nil {
		status = http.StatusBadGateway
	}
	e := Entry{At: time.Now().UTC(), Who: who.String(), Order: clip(in.String()), Why: clip(in.Why)}
	line := []any{"who", e.Who, "order", e.Order, "why", e.Why}
	if err != nil {
		e.Error = clip(err.Error())
		c.audit.order(e)
		c.log.Warn("console: an operator's change of the quarantine was not made, or not everywhere", append(line, "error", err)...)
		operator.Answer(w, status, map[string]string{"error": err.Error()})
		return
	}
	c.audit.order(e)
	c.log.Info("console: an operator's change of the quarantine was made", line...)
	operator.Answer(w, http.StatusOK, c.rules())
}

func (c *Console) changeRule(in RuleChange) error {
	rule, err := dlq.ParseRule(in.Rule)
	if err != nil {
		return err
	}
	lists := c.lists()
	if len(lists) == 0 {
		return errors.New("quarantine: the guards of this process have no list")
	}
	for _, q := range lists {
		if in.Remove {
			err = errors.Join(err, q.Remove(rule, in.By))
			continue
		}
		entry := dlq.QuarantineEntry{Rule: rule, By: in.By, Why: in.Why}
		if in.For != 0 {
			entry.Until = time.Now().Add(in.For)
		}
		err = errors.Join(err, q.Add(entry))
	}
	return err
}

// confirm asks the other processes of the fleet whether a change made here is in force
// there.
func (c *Console) confirm(ctx context.Context, in RuleChange, who string) error {
	if c.fleet == nil || len(c.fleet.carrier.Members()) < 2 {
		return nil
	}
	o := in.order()
	o.In = inFleet
	out, err := c.fleet.give(ctx, o, who)
	if err != nil {
		return fmt.Errorf("%s: done here and sent, but the other processes cannot be asked: %w", in, err)
	}
	var lacking []string
	for _, a := range out.Processes {
		if a.Error != "" {
			lacking = append(lacking, "not by "+a.Process+": "+a.Error)
		}
	}
	if len(out.Silent) > 0 {
		lacking = append(lacking, "no answer from "+strings.Join(out.Silent, ", "))
	}
	if len(lacking) > 0 {
		return fmt.Errorf("%s: done here and sent, but %s", in, strings.Join(lacking, "; "))
	}
	return nil
}

// heeds returns an error if a change of the quarantine is not in force in this process.
func (c *Console) heeds(o Order) error {
	for _, q := range c.lists() {
		on := slices.ContainsFunc(q.Entries(), func(e dlq.QuarantineEntry) bool { return e.Rule.String() == o.Sources[0] })
		switch {
		case on && o.Action == removeRule:
			return errors.New("still on its guards' list, which may be one of its own and not the fleet's")
		case !on && o.Action == addRule:
			return errors.New("not on its guards' list, which may be one of its own and not the fleet's")
		}
	}
	return nil
}
