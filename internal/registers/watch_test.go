// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package registers

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"
)

// A store that is read and then refuses to be watched is asked again after longer and
// longer pauses, and soon again once it has worked for a while.
func TestWatchPauses(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		sessions, works := 0, time.Duration(0)
		var ended time.Time
		var pause time.Duration
		watch := func() {
			_ = Watch(ctx, func(uint64, []byte, error) {}, func(ctx context.Context, emit func(uint64, []byte) error) error {
				if sessions++; !ended.IsZero() {
					pause = time.Since(ended)
				}
				if err := emit(1, []byte("x")); err != nil {
					return err
				}
				Sleep(ctx, works)
				ended = time.Now()
				return errors.New("permission denied")
			})
		}
		watch()
		if sessions > 70 || sessions < 50 || pause != maxPause {
			t.Errorf("%d sessions in a minute, the last after %s", sessions, pause)
		}
		works = 2 * time.Second
		ctx, cancel = context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		if watch(); pause != minPause {
			t.Errorf("a pause of %s after a session that worked", pause)
		}
	})
}
