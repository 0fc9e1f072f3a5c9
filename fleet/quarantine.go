// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"time"

	"github.com/stormguard-mq/stormguard/dlq"
	"github.com/stormguard-mq/stormguard/internal/fleetstate"
	"github.com/stormguard-mq/stormguard/internal/gossip"
	"github.com/stormguard-mq/stormguard/internal/operator"
)

// Quarantine is the fleet's list of rules, for guard.WithQuarantine: no process handles a message
// that matches. A change is in force everywhere within a second. A process that is cut off gets it
// when it is heard again. The journal has each change, who made it and why. Without a roster the
// list is this process's own.
func (p *Process) Quarantine() dlq.Quarantine { return p.rules }

// rules is the fleet's list, and writes its changes to the journal.
type rules struct {
	dlq.Quarantine

	p *Process
}

// Add implements [dlq.Quarantine].
func (r rules) Add(e dlq.QuarantineEntry) error {
	err := r.p.inFleet()
	if err == nil {
		err = r.Quarantine.Add(e)
	}
	if err == nil {
		r.p.write(fleetstate.Entry{Kind: fleetstate.EntryQuarantined, Subject: e.Rule.String(), Text: spoken(e.By, e.Why)})
	}
	return err
}

// Remove implements [dlq.Quarantine].
func (r rules) Remove(rule dlq.Rule, by string) error {
	err := r.p.inFleet()
	if err == nil {
		err = r.Quarantine.Remove(rule, by)
	}
	if err == nil {
		r.p.write(fleetstate.Entry{Kind: fleetstate.EntryReleased, Subject: rule.String(), Text: spoken(by, "")})
	}
	return err
}

// spoken is the journal's text of who and why. The journal keeps the first 128 bytes.
func spoken(by, why string) string {
	if by != "" {
		by = "by " + by
	}
	if by != "" && why != "" {
		by += ": "
	}
	return by + why
}

// joinQuarantine makes the fleet's list.
func (p *Process) joinQuarantine() (*fleetstate.Quarantine, error) {
	q, err := fleetstate.NewQuarantine(p.self, time.Now)
	if err == nil {
		p.rules, p.quarantine = rules{q, p}, q
	}
	return q, err
}

// keepFleetTime tells the list and the orders the offset of our clock from the peers' clocks.
// Without any known offset the fleet's time stays as it was.
func (p *Process) keepFleetTime() {
	if offsets := offsetsOf(p.node.Peers()); len(offsets) > 0 {
		p.orders.Offset(p.quarantine.Offset(offsets))
	}
}

// backFor is how long a silent peer may still come back. Its clock counts until then.
const backFor = 10 * time.Minute

// offsetsOf returns the offsets from which the fleet's time is computed. A peer that has gone keeps
// its last offset, which is wrong once our clock is set. So it does not count. A peer that was
// heard within backFor counts: without it, half of the remaining clocks may be one wrong clock.
func offsetsOf(peers []gossip.Peer) (all []time.Duration) {
	for _, peer := range peers {
		if peer.HasOffset && peer.Heard < backFor {
			all = append(all, peer.Offset)
		}
	}
	return all
}

// QuarantineRequest is a change of the quarantine, as a client sends it.
type QuarantineRequest struct {
	Rule   string        `json:"rule"`             // as [dlq.ParseRule] reads it
	Remove bool          `json:"remove,omitempty"` // remove the rule; false adds it
	For    time.Duration `json:"for_ns,omitempty"` // 0 means 24 h
	By     string        `json:"by,omitempty"`     // who asks; with a token, the token's name counts instead
	Why    string        `json:"why,omitempty"`
}

// A Quarantined is a rule in force, as the handler sends it.
type Quarantined struct {
	Rule  string    `json:"rule"`
	By    string    `json:"by,omitempty"`
	Why   string    `json:"why,omitempty"`
	At    time.Time `json:"at"`
	Until time.Time `json:"until"`
}

func (p *Process) quarantined() []Quarantined {
	all := []Quarantined{}
	for _, e := range p.rules.Entries() {
		all = append(all, Quarantined{e.Rule.String(), e.By, e.Why, e.At.UTC(), e.Until.UTC()})
	}
	return all
}

// serveQuarantine answers requests about the list. The caller has checked who asks.
func (p *Process) serveQuarantine(mux *http.ServeMux) {
	mux.HandleFunc("GET /fleet/quarantine", func(w http.ResponseWriter, _ *http.Request) { operator.Answer(w, http.StatusOK, p.quarantined()) })
	mux.HandleFunc("POST /fleet/quarantine", func(w http.ResponseWriter, r *http.Request) {
		var in QuarantineRequest
		d := json.NewDecoder(http.MaxBytesReader(w, r.Body, maxBody))
		d.DisallowUnknownFields()
		err := d.Decode(&in)
		if err == nil && d.More() {
			err = errors.New("want one object")
		}
		if err != nil {
			refuse(w, fmt.Errorf("%w: body: %w", fleetstate.ErrConfig, err))
			return
		}
		who, _ := operator.From(r.Context())
		line := []any{"who", who.Remote, "token", who.Token, "by", audited(in.By), "rule", audited(in.Rule), "remove", in.Remove, "why", audited(in.Why)}
		if err := p.changeQuarantine(in, who); err != nil {
			p.log.Warn("fleet: an operator's change of the quarantine was not made", append(line, "error", err)...)
			if p.Err() == nil {
				err = fmt.Errorf("%w: %w", fleetstate.ErrConfig, err)
			}
			refuse(w, err)
			return
		}
		p.log.Info("fleet: an operator's change of the quarantine was made", line...)
		operator.Answer(w, http.StatusOK, p.quarantined())
	})
}

func (p *Process) changeQuarantine(in QuarantineRequest, who operator.Who) error {
	rule, err := dlq.ParseRule(in.Rule)
	if err != nil {
		return err
	}
	by := in.By
	if who.Token != "" {
		by = who.Token
	}
	if in.Remove {
		return p.rules.Remove(rule, by)
	}
	e := dlq.QuarantineEntry{Rule: rule, By: by, Why: in.Why}
	if in.For != 0 {
		e.Until = time.Now().Add(in.For)
	}
	return p.rules.Add(e)
}
