// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"net/http"
	"time"

	"github.com/stormguard-mq/stormguard/internal/fleetstate"
	"github.com/stormguard-mq/stormguard/internal/operator"
)

// Orders carries an operator's orders to the consoles of all processes, and their answers
// back: for console.Config.Fleet. That of a process that is alone reaches itself only.
func (p *Process) Orders() operator.Carrier { return carrier{p} }

// carrier is the process as a console sees it.
type carrier struct{ p *Process }

func (c carrier) Place() (name, zone string) { return c.p.self.Name, c.p.cfg.Gossip.Zone }

func (c carrier) Routes() http.Handler { return c.p.routes() }

func (c carrier) Members() []operator.Member { return addressees(c.p.Status().Members) }

// addressees are the processes that orders are for. One in the roster is, until it leaves or is
// evicted; one outside that was not heard for long has gone.
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
