// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package console

import (
	"slices"
	"sync"
	"time"
)

// An Entry of the audit is one order, carried out or not, or a refused request.
type Entry struct {
	At      time.Time `json:"at"`
	Who     string    `json:"who"`   // the token's name and the address
	Order   string    `json:"order"` // of a refused request, its method and path
	Why     string    `json:"why,omitempty"`
	Results []Result  `json:"results,omitempty"` // the first 100
	Fleet   string    `json:"fleet,omitempty"`   // of an order to other processes: what became of it
	Error   string    `json:"error,omitempty"`   // why nothing was done
}

const (
	mostEntries = 1000
	mostRefused = 100 // others decide how many there are
	mostResults = 100 // of one entry
)

// audit is the last entries of this process. Refused requests have room of their own, so
// that a flood of them leaves the orders alone.
type audit struct {
	mu      sync.Mutex
	orders  []Entry // oldest first
	refused []Entry
}

func (a *audit) order(e Entry) {
	a.mu.Lock()
	defer a.mu.Unlock()
	e.Results = slices.Clone(e.Results[:min(len(e.Results), mostResults)]) // and no more of a long one
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

// entries are both, oldest first.
func (a *audit) entries() []Entry {
	a.mu.Lock()
	defer a.mu.Unlock()
	all := append([]Entry{}, a.orders...)
	all = append(all, a.refused...)
	slices.SortStableFunc(all, func(x, y Entry) int { return x.At.Compare(y.At) })
	return all
}
