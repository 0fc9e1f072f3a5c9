// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package console

import (
	"slices"
	"sync"
	"time"
)

// An Entry is one entry of the audit: an order, carried out or not, or a refused request.
type Entry struct {
	At      time.Time `json:"at"`
	Who     string    `json:"who"`   // the token's name, and the client's address
	Order   string    `json:"order"` // the order, or the method and path of a refused request
	Why     string    `json:"why,omitempty"`
	Results []Result  `json:"results,omitempty"` // at most the first 100
	Fleet   string    `json:"fleet,omitempty"`   // the outcome in other processes, for an order to the fleet
	Error   string    `json:"error,omitempty"`   // why nothing was done
}

const (
	mostEntries = 1000
	mostRefused = 100 // clients decide how many there are
	mostResults = 100 // results of one entry
)

// audit holds the latest entries of this process. Refused requests have a list of their
// own, so that many of them do not displace orders.
type audit struct {
	mu      sync.Mutex
	orders  []Entry // oldest first
	refused []Entry
}

func (a *audit) order(e Entry) {
	a.mu.Lock()
	defer a.mu.Unlock()
	e.Results = slices.Clone(e.Results[:min(len(e.Results), mostResults)]) // a copy, so that a long list is not kept
	a.orders = push(a.orders, e, mostEntries)
}

func (a *audit) refuse(e Entry) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.refused = push(a.refused, e, mostRefused)
}

func push(all []Entry, e Entry, most int) []Entry {
	if len(all) >= most {
		all = slices.Delete(all, 0, len(all)-most+1)
	}
	return append(all, e)
}

// entries returns orders and refused requests, oldest first.
func (a *audit) entries() []Entry {
	a.mu.Lock()
	defer a.mu.Unlock()
	all := append([]Entry{}, a.orders...)
	all = append(all, a.refused...)
	slices.SortStableFunc(all, func(x, y Entry) int { return x.At.Compare(y.At) })
	return all
}
