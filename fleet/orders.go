// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"net/http"
	"time"

	"github.com/stormguard-mq/stormguard/internal/fleetstate"
	"github.com/stormguard-mq/stormguard/internal/operator"
)

// Orders carries an operator's orders to the consoles of all processes, and brings their answers
// back. It is for console.Config.Fleet. Without a roster it reaches this process only.
func (p *Process) Orders() operator.Carrier { return carrier{p} }

// carrier is a Process as a console sees it.
type carrier struct{ p *Process }

func (c carrier) Place() (name, zone string) { return c.p.self.Name, c.p.cfg.Gossip.Zone }

func (c carrier) Routes() http.Handler { return c.p.routes() }

func (c carrier) Members() []operator.Member { return addressees(c.p.Status().Members) }

// addressees returns the processes that orders are for. A process in the roster counts until it
// leaves or is evicted. A process outside the roster counts until it was silent for 10 min.
func addressees(members []Member) (all []operator.Member) {
	const gone = 10 * time.Minute
	for _, m := range members {
		heard := m.State == "self" || m.State == "fresh"
		if heard || m.Roster || m.Heard < gone {
			all = append(all, operator.Member{Name: m.Name, Zone: m.Zone, Heard: heard})
		}
	}
	return all
}

func (c carrier) Give(o operator.Carried, what, who, why string) error {
	if c.p.orders == nil {
		return errAlone
	}
	err := c.p.inFleet()
	if err == nil {
		err = c.p.orders.Give(o.ID, o.Order, o.Until)
	}
	if err == nil {
		c.p.write(fleetstate.Entry{Kind: fleetstate.EntryOrdered, Subject: what, Text: spoken(who, why)})
	}
	return err
}

func (c carrier) Answer(id, text string) error {
	if c.p.orders == nil {
		return errAlone
	}
	return c.p.orders.Answer(id, text)
}

func (c carrier) Answers(id string) map[string]string {
	if c.p.orders == nil {
		return nil
	}
	return c.p.orders.Answers(id)
}

func (c carrier) InForce() (all []operator.Carried) {
	if c.p.orders == nil {
		return nil
	}
	for _, o := range c.p.orders.InForce() {
		all = append(all, operator.Carried{ID: o.ID, Order: o.Text, Until: o.Until})
	}
	return all
}

func (c carrier) Watch(f func()) (stop func()) {
	if c.p.orders == nil {
		return func() {}
	}
	return c.p.orders.Watch(f)
}
