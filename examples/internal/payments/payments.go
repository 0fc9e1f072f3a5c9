// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

// Package payments is the dependency of the examples' tests: a service with an outage of
// one second.
package payments

import (
	"fmt"
	"sync"
	"syscall"
	"time"
)

const (
	// Orders is the number of orders that a test publishes, from 1 on.
	Orders = 200

	// Poison is the order that cannot be charged.
	Poison = 13

	dies = 50 // the order at which the outage begins
)

// Service charges orders. Its outage of a second begins at order 50. It is safe for
// concurrent use.
type Service struct {
	mu      sync.Mutex
	back    time.Time // when the outage ends; zero before it began
	failed  int       // calls in the outage
	charged []int     // in the order of success
	done    chan struct{}
}

// New makes a service.
func New() *Service { return &Service{done: make(chan struct{})} }

// Charge charges an order.
func (s *Service) Charge(order int) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if order == Poison {
		return fmt.Errorf("payments: order %d has no customer", order)
	}
	if order == dies && s.back.IsZero() {
		s.back = time.Now().Add(time.Second)
	}
	if time.Now().Before(s.back) {
		s.failed++
		return fmt.Errorf("payments: %w", syscall.ECONNREFUSED)
	}
	if s.charged = append(s.charged, order); len(s.charged) == Orders-1 {
		close(s.done)
	}
	return nil
}

// Done returns a channel that is closed when all orders but the poisonous one have been
// charged.
func (s *Service) Done() <-chan struct{} { return s.done }

// Check returns an error unless each order was charged once (in order, if ordered) and the
// outage cost few calls.
func (s *Service) Check(ordered bool) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	last, seen := 0, make(map[int]bool)
	for _, order := range s.charged {
		if seen[order] {
			return fmt.Errorf("order %d was charged twice", order)
		}
		if ordered && order < last {
			return fmt.Errorf("order %d was charged after order %d", order, last)
		}
		last, seen[order] = order, true
	}
	if len(seen) != Orders-1 || s.failed > 2*dies {
		return fmt.Errorf("%d orders charged, want %d; %d calls in an outage of a second, want %d at most",
			len(seen), Orders-1, s.failed, 2*dies)
	}
	return nil
}
