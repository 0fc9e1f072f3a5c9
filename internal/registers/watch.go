// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

// Package registers is what the drivers of fleet/register share: the life of a watch,
// the form of a stored document, and the fold of a log.
package registers

import (
	"context"
	"errors"
	"fmt"
	"time"
)

// ErrBack means that the newest number is less than it was.
var ErrBack = errors.New("register: the number went back")

const (
	minPause = 20 * time.Millisecond
	maxPause = time.Second

	// Pulse is how often a session asks the store for a sign of life, and how long
	// it waits for the answer.
	Pulse = 2 * time.Second
)

// Watch runs sessions, one after the other, until ctx ends, and returns its error. A
// session connects, hands the newest document to emit, then each later one, and ends
// with an error when it hears no more. emit returns an error that the session must
// return. Within a session what emit is given must not go back, news that a look has
// overtaken included: that would say that the store went back.
//
// on hears of a document, or of an error once while no session has a document. It is
// called on the goroutine of Watch if the session calls emit there.
func Watch(ctx context.Context, on func(number uint64, document []byte, err error),
	session func(ctx context.Context, emit func(uint64, []byte) error) error,
) error {
	last, away := uint64(0), false
	pause := minPause
	for ctx.Err() == nil {
		fresh, began := true, time.Now()
		err := session(ctx, func(number uint64, document []byte) error {
			if ctx.Err() != nil {
				return ctx.Err()
			}
			if number < last {
				return fmt.Errorf("%w, from %d to %d: the store was wiped, or is an older copy", ErrBack, last, number)
			}
			if fresh || number > last {
				fresh, away, last = false, false, number
				on(number, document, nil)
			}
			return nil
		})
		if ctx.Err() != nil {
			break
		}
		if time.Since(began) >= maxPause { // it worked for a while
			pause = minPause
		}
		if !away {
			away = true
			on(0, nil, err)
		}
		if !Sleep(ctx, pause) {
			break
		}
		pause = min(2*pause, maxPause)
	}
	return ctx.Err()
}

// Sleep waits; false when ctx ends first.
func Sleep(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}
