// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

// Package registers is shared by the drivers of fleet/register. It has the loop of a watch, the
// form of a stored document, and the fold of a log.
package registers

import (
	"context"
	"errors"
	"fmt"
	"time"
)

// ErrBack means that the newest number is lower than before.
var ErrBack = errors.New("register: the number went back")

const (
	minPause = 20 * time.Millisecond
	maxPause = time.Second

	// Pulse is how often a session checks that the store answers, and how long it waits for that.
	Pulse = 2 * time.Second
)

// Watch runs sessions, one after the other, until ctx ends, and returns the error of ctx.
//
// A session connects, passes the newest document to emit, then each later one. It ends with an
// error when it can read no more. If emit returns an error, the session must return it. Within a
// session the numbers passed to emit must not fall, or Watch reports that the store went back. So a
// session must leave out a notification that a read has overtaken.
//
// on gets each document, or an error once while no session has a document. Watch calls it on its
// own goroutine if the session calls emit there.
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
		if time.Since(began) >= maxPause { // the session worked for a while
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

// Sleep waits for d. It returns false if ctx ends first.
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
