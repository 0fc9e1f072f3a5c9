// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package register_test

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/stormguard-mq/stormguard/fleet/register"
)

// An operator changes the limit. The change happens or does not, and the operator
// knows which.
func Example() {
	folder, err := os.MkdirTemp("", "register")
	if err != nil {
		log.Fatal(err)
	}
	defer os.RemoveAll(folder) //nolint:errcheck // a folder for temporary files
	r, err := register.NewFile(filepath.Join(folder, "fleet"))
	if err != nil {
		log.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()

	newest, before, err := r.Read(ctx)
	if err != nil {
		log.Fatal(err)
	}
	id := rand.Text()
	err = r.CompareAndSet(ctx, newest+1, []byte("rate: 500, id: "+id))
	if errors.Is(err, register.ErrUnknown) {
		// The answer was lost. A document that changes nothing takes the number,
		// unless ours has it.
		noop := append(before, " "...)
		var document []byte
		later, stop := context.WithTimeout(context.Background(), time.Minute)
		defer stop()
		if _, document, err = register.Settle(later, r, newest+1, noop); err == nil && !strings.Contains(string(document), id) {
			err = errors.New("the limit was not changed")
		}
	}
	if err != nil {
		log.Fatal(err)
	}

	newest, document, err := r.Read(ctx)
	fmt.Println(newest, strings.HasPrefix(string(document), "rate: 500"), err)
	// Output: 1 true <nil>
}

// A process follows the newest document, and keeps what it has while the store is away.
func ExampleRegister() {
	var r register.Register = new(register.Memory)
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	if err := r.CompareAndSet(ctx, 1, []byte("rate: 100")); err != nil {
		log.Fatal(err)
	}
	err := r.Watch(ctx, func(e register.Event) {
		if e.Err != nil {
			log.Print("the register is away; the limits stay: ", e.Err)
			return
		}
		fmt.Printf("number %d: %s\n", e.Number, e.Document)
		cancel() // a program goes on
	})
	fmt.Println(err)
	// Output:
	// number 1: rate: 100
	// context canceled
}
